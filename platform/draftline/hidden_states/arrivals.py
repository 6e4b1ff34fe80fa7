"""When states are due in the store, and whose fault it is when they are missing. Pure: the caller brings the clock."""

from __future__ import annotations

from collections.abc import Iterable

from draftline.hidden_states.master import CLIENT_TTL_S

# A manifest comes before its states are written; states that take longer were not written.
ARRIVAL_S = 15.0
# A store that was restarted or lost a segment is itself again after this time.
SETTLE_S = CLIENT_TTL_S + 2.0


class Arrivals:
    """When replicas answered, by key, and until when the store cannot be trusted. Times in seconds of one clock."""

    def __init__(self) -> None:
        self._answered_at: dict[str, float] = {}
        self._settled_at = 0.0

    def answered(self, key: str, now: float) -> None:
        """A replica has answered: the states of `key` are on their way."""
        self._answered_at[key] = now

    def forget(self, key: str) -> None:
        """The key is no longer in the store."""
        self._answered_at.pop(key, None)

    def late(self, keys: Iterable[str], now: float) -> list[str]:
        """Those of the keys whose states should have been written by now."""
        return [key for key in keys if self._answered_at.get(key, 0.0) <= now - ARRIVAL_S]

    def unsettle(self, now: float, longer_s: float = 0.0) -> None:
        """The store has just lost something; it is itself again `SETTLE_S`, and `longer_s`, from now on."""
        self._settled_at = max(self._settled_at, now + SETTLE_S + longer_s)

    def blameless(self, key: str) -> bool:
        """True for states that were written before the store was itself again: losing them does not count as a try."""
        return self._answered_at.get(key, 0.0) < self._settled_at
