"""What went wrong and was mended while states were extracted, for the driver's log. Bounded; pure bookkeeping."""

from __future__ import annotations

from collections import deque
from typing import Literal

# What was lost: a target replica, the Mooncake master, or the states of single samples.
LostPart = Literal["replica", "master", "state"]

KEPT = 1000


class Incidents:
    """The newest `KEPT` incidents as (part, text), and how many there were in all."""

    def __init__(self) -> None:
        self.total = 0
        self._newest: deque[tuple[LostPart, str]] = deque(maxlen=KEPT)

    def add(self, part: LostPart, text: str) -> None:
        """Notes one incident."""
        self.total += 1
        self._newest.append((part, text))

    def newest(self) -> list[tuple[LostPart, str]]:
        """Those that are kept, the oldest of them first; the last one is number `total`."""
        return list(self._newest)
