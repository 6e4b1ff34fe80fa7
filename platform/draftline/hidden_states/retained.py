"""States that a later epoch wants again: kept in the store as long as nothing needed sooner wants the room. Pure.

Without it every epoch would extract every sample again. When the window holds a whole epoch, each sample is extracted
once; when it does not, what is wanted latest goes first (Belady's rule; it needs the future, and the plan is that).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable

from draftline.hidden_states.entries import Entry
from draftline.samples.plan import BatchPlan


class Retained:
    """Used-up entries by sample, each with the index of the row that wants its states next."""

    def __init__(self, plan: BatchPlan) -> None:
        self._uses: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(plan.rows):
            for sample in row.samples:
                self._uses[sample].append(index)
        self._kept: dict[int, tuple[int, Entry]] = {}
        self._order: list[tuple[int, int]] = []  # (next row, sample), increasing
        self._row_end = len(plan.rows)

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(entry.size_bytes for _, entry in self._kept.values())

    def handles(self) -> dict[str, str]:
        """Handle in the store by key of all that is kept."""
        return {entry.key: entry.handle for _, entry in self._kept.values()}

    def keep(self, entry: Entry) -> bool:
        """Keeps the states of an entry whose row was committed. False: no later row wants them."""
        uses = self._uses[entry.sample]
        following = bisect.bisect_right(uses, entry.order[0])
        if following == len(uses) or uses[following] >= self._row_end:
            return False
        self._kept[entry.sample] = (uses[following], entry)
        bisect.insort(self._order, (uses[following], entry.sample))
        return True

    def take(self, sample: int) -> Entry | None:
        """The kept entry of a sample, which is no longer kept."""
        use, entry = self._kept.pop(sample, (0, None))
        if entry is not None:
            del self._order[bisect.bisect_left(self._order, (use, sample))]
        return entry

    def drop_one(self, row: int) -> Entry | None:
        """Lets go of the entry that is missed least when `row` needs room; None: all that is kept is for this row.

        That is one whose row has gone by (its sample was skipped there), or else the one wanted latest.
        """
        for use, sample in self._order[:1]:
            if use < row:
                return self.take(sample)
        for use, sample in self._order[-1:]:
            if use > row:
                return self.take(sample)
        return None

    def finish(self, row_end: int) -> list[Entry]:
        """No row from `row_end` on is wanted any more: lets go of what is kept for those."""
        self._row_end = min(self._row_end, row_end)
        return self.drop([entry.key for use, entry in self._kept.values() if use >= row_end])

    def drop(self, keys: Iterable[str]) -> list[Entry]:
        """Lets go of the entries with these keys."""
        gone = set(keys)
        dropped = [entry for _, entry in self._kept.values() if entry.key in gone]
        for entry in dropped:
            self.take(entry.sample)
        return dropped
