"""The window: which samples are extracted ahead of training, in bytes. A pure state machine; the feeder acts on it.

Samples are leased in plan order, and what returns (a capture failed, states were lost) is leased again before anything
new. So the row that is needed next can always be completed, whatever else the window holds:

    planned -> leased(replica) -> stored(manifest) -> delivered(rank, position) -> consumed (kept for a later epoch)
       ^----------- failed, lost, replica or store lost, restarted ------------'      (or skipped, after K failures)

A key's bytes count from the lease until `released`, that is, until the store no longer holds them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from draftline.errors import InputError
from draftline.hidden_states.course import Course
from draftline.hidden_states.entries import Delivery, Entry, Lease, OpenRow, State, WindowLimits
from draftline.hidden_states.ledger import Ledger
from draftline.hidden_states.retained import Retained
from draftline.samples.plan import BatchPlan


class Window:
    """The state machine of one feeder.

    `sizes` gives each sample's bytes in the store, `skipped` what an earlier attempt of the run gave up: reason by
    (sample, epoch). Raises InputError when the budget cannot hold the rows that all ranks take at one position.
    """

    def __init__(
        self,
        plan: BatchPlan,
        sizes: Mapping[int, int],
        limits: WindowLimits,
        replicas: Iterable[str],
        key_prefix: str,
        skipped: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        self._plan = plan
        self._sizes = sizes
        self._attempts = limits.attempts
        self._key_prefix = key_prefix
        self._skipped = dict(skipped or {})
        self._samples = sum(len(row.samples) for row in plan.rows)
        self._course = Course(plan)
        self._retained = Retained(plan)
        self._ledger = Ledger(limits.budget_bytes, limits.concurrency, replicas)
        self._first_budget_bytes = limits.budget_bytes
        self._attempt = self._last_attempt = 0
        self.starts = 0  # how often training has begun
        self._largest_bytes = max((self._position_bytes(position) for position in range(plan.positions)), default=0)
        if self._largest_bytes > limits.budget_bytes:
            raise InputError(
                f"hidden_states.window_bytes: found {limits.budget_bytes}; allowed: at least {self._largest_bytes} "
                f"bytes, which the rows of {plan.ranks} rank(s) take at one position"
            )
        self._forget()

    # What is in the window

    @property
    def held_bytes(self) -> int:
        """Bytes leased, stored, or not yet deleted."""
        return self._ledger.held_bytes

    @property
    def budget_bytes(self) -> int:
        """Most bytes at once."""
        return self._ledger.budget_bytes

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that live."""
        return self._ledger.replicas

    @property
    def skipped(self) -> dict[tuple[int, int], str]:
        """Reason by (sample, epoch) of what was given up."""
        return dict(self._skipped)

    @property
    def skipped_share(self) -> float:
        """Share of the plan's samples that were given up."""
        return len(self._skipped) / max(self._samples, 1)

    def in_flight(self, replica: str) -> int:
        """Captures that a replica works on."""
        return self._ledger.in_flight(replica)

    def handles(self) -> dict[str, str]:
        """Handle in the store by key of all that is stored and waits for its row to be taken, or is kept for later."""
        stored = {entry.key: entry.handle for entry in self._live.values() if entry.state is State.STORED}
        return stored | self._retained.handles()

    def bytes_by_state(self) -> dict[str, int]:
        """Bytes in the window by state; `leaving` waits to be deleted, or for a capture that is no longer wanted."""
        figures = {"leased": 0, "stored": 0, "delivered": 0, "kept": self._retained.size_bytes}
        for entry in self._live.values():
            figures[entry.state] += entry.size_bytes
        return figures | {"leaving": self.held_bytes - sum(figures.values())}

    # Captures

    def lease(self, replica: str) -> Lease | None:
        """The next sample in plan order for this replica. None: it is busy or gone, or there is no work or no room."""
        entry = self._next_planned()
        while entry is not None and self._reuse(entry):
            entry = self._next_planned()
        # States that an earlier row has now can be used again once it is committed: they are waited for.
        if entry is None or entry.sample in self._at_work or not self._ledger.takes_more(replica):
            return None
        if not self._has_room(entry):
            return None
        self._take_returned(entry)
        entry.state = State.LEASED
        entry.key = f"{self._key_prefix}-{entry.attempt}-{entry.sample}-{entry.epoch}"
        self._enter(entry)
        self._ledger.hold(entry.key, entry.size_bytes, replica)
        return Lease(entry.key, entry.sample, entry.epoch)

    def stored(self, key: str, manifest: Mapping[str, Any]) -> bool:
        """A capture answered. False: it is no longer wanted, and its states are to be deleted."""
        self._ledger.answered(key)
        entry = self._live.get(key)
        if entry is None:
            self._ledger.leave(key, str(manifest["handle"]))
            return False
        entry.state = State.STORED
        entry.manifest = manifest
        return True

    def failed(self, key: str, reason: str) -> None:
        """A capture failed and left nothing in the store."""
        self._ledger.answered(key)
        self._ledger.released(key)
        entry = self._live.get(key)
        if entry is not None:
            self._exit(entry)
            self._count_failure(entry, reason)

    def add_replica(self, replica: str) -> None:
        """A new replica takes part; its name is its own. ValueError for one that a living replica has."""
        self._ledger.add_replica(replica)

    def replica_lost(self, replica: str) -> None:
        """A replica died: its captures are made by others."""
        for key in self._ledger.drop_replica(replica):
            self._ledger.released(key)
            entry = self._live.get(key)
            if entry is not None:
                self._exit(entry)
                self._return(entry)

    # Rows

    def deliver(self, rank: int, position: int) -> list[Delivery] | None:
        """The row's samples, or None while they are not all stored. May be asked for again until it is committed."""
        row = self._open(self._course.row(rank, position))
        if any(entry.state in (State.PLANNED, State.LEASED) for entry in row.entries):
            return None
        row.delivered = True
        self._course.delivered(position)
        there = [entry for entry in row.entries if entry.state is not State.SKIPPED]
        for entry in there:
            entry.state = State.DELIVERED
        return [Delivery(entry.sample, entry.epoch, entry.key, entry.manifest) for entry in there]

    def commit(self, rank: int, position: int) -> None:
        """The row is used up. Each rank commits its positions in order, and only what was delivered to it."""
        index = self._course.row(rank, position)
        self._course.require_next(rank, position)
        if not self._open(index).delivered:
            raise ValueError(f"rank {rank} commits position {position}, which was not delivered to it")
        for entry in self._rows.pop(index).entries:
            if entry.state is State.DELIVERED and not entry.gone and self._retained.keep(entry):
                self._exit(entry)
            else:
                self._drop(entry)
            entry.state = State.CONSUMED
        self._course.commit(rank)

    def comes_later(self, rank: int, position: int) -> bool:
        """True while other positions are to be committed before this one."""
        self._course.row(rank, position)
        return self._course.is_ahead(rank, position)

    def lost(self, key: str, reason: str, *, blameless: bool = False) -> bool:
        """Stored states cannot be read: they are captured again, and their row is to be asked for again.

        False when the key is not in the window (any more). `blameless`: it does not count as a try at the sample.
        """
        entry = self._live.get(key)
        if entry is None or entry.state is State.LEASED:
            return False
        self._drop(entry)
        self._rows[entry.order[0]].delivered = False
        if blameless:
            self._return(entry)
        else:
            self._count_failure(entry, reason)
        return True

    def vanished(self, keys: Iterable[str]) -> None:
        """The store lost these states, through no fault of the samples. Delivered ones are left to their reader."""
        gone = set(keys)
        for kept in self._retained.drop(gone):
            self._ledger.leave(kept.key, kept.handle)
        for key in gone:
            entry = self._live.get(key)
            if entry is None:
                continue
            if entry.state is State.DELIVERED:
                entry.gone = True  # read already, or its reader says that it is lost
            else:
                self._drop(entry)
                self._return(entry)

    def store_lost(self) -> None:
        """The store lost everything: what was stored or on its way there is captured again."""
        self.vanished([*self._live, *self._retained.handles()])

    def shrink(self, budget_bytes: int) -> None:
        """Lowers the budget, as when a segment is gone; what was not delivered yet is given up and captured again.

        Raises InputError when what is delivered and one more position do not fit.
        """
        delivered_bytes = self.bytes_by_state()["delivered"]
        if delivered_bytes + self._largest_bytes > budget_bytes:
            raise InputError(
                f"the store's remaining segments hold {budget_bytes} bytes; {delivered_bytes} bytes with the train "
                f"workers and {self._largest_bytes} bytes of one more position do not fit"
            )
        self._ledger.budget_bytes = min(self.budget_bytes, budget_bytes)
        there = [key for key, entry in self._live.items() if entry.state is not State.DELIVERED]
        self.vanished([*there, *self._retained.handles()])

    def grow(self, budget_bytes: int) -> None:
        """Raises the budget again, as when a segment was added; never above the window's first one."""
        self._ledger.budget_bytes = max(self.budget_bytes, min(self._first_budget_bytes, budget_bytes))

    # Deletion

    def take_leaving(self) -> dict[str, str]:
        """Handle in the store by key of what is to be deleted now; each is handed out once, see `released`."""
        return self._ledger.take_leaving()

    def released(self, key: str) -> None:
        """The store no longer holds this key: its bytes leave the window."""
        self._ledger.released(key)

    # Where training is

    def begin(self, position: int) -> None:
        """Training starts at this position: the held-out rows and all from there on are planned (again).

        What is in the window stays when it is of use as it stands: nothing was used up, and the position is the same.
        """
        self.starts += 1
        if position == self._course.start and self._course.untouched:
            self._course.begin_again()
            for row in self._rows.values():
                row.delivered = False
            for entry in self._live.values():
                entry.state = State.STORED if entry.state is State.DELIVERED else entry.state
            self.vanished([key for key, entry in self._live.items() if entry.gone])
            return
        self._course.begin(position)
        self.vanished(list(self._retained.handles()))
        for entry in list(self._live.values()):
            self._drop(entry)
        self._attempt = self._last_attempt = self._last_attempt + 1
        self._forget()

    def join(self, rank: int, position: int, group: str) -> None:
        """One rank of a worker group says where it starts; training begins there once all have, see `has_begun`."""
        if self._course.join(rank, position, group):
            self.begin(position)

    def has_begun(self, group: str) -> bool:
        """True once all ranks of the group have joined. ValueError when a newer group came instead."""
        return self._course.has_begun(group)

    # Where training ends

    def finish_early(self) -> int:
        """Training ends after what any rank has been given by now; returns the first position that is left out.

        What lies beyond is neither captured nor kept, see `is_over`. The end stays for a training that starts again;
        one that starts at or behind it gets its held-out rows and no others.
        """
        end = self._course.finish_early()
        row_end = self._course.row_end
        for kept in self._retained.finish(row_end):
            self._ledger.leave(kept.key, kept.handle)
        for index in [index for index in self._rows if index >= row_end]:
            for entry in self._rows.pop(index).entries:
                self._drop(entry)
        self._returned[:] = [(order, entry) for order, entry in self._returned if order[0] < row_end]
        heapq.heapify(self._returned)
        return end

    def is_over(self, position: int) -> bool:
        """True for a position that is left out because training ends before it."""
        return self._course.end <= position < self._plan.positions

    # Inside

    def _forget(self) -> None:
        """Nothing is in the window but what must still be deleted."""
        self._rows: dict[int, OpenRow] = {}
        self._live: dict[str, Entry] = {}  # by key: leased, stored, delivered
        self._at_work: set[int] = set()  # their samples
        self._returned: list[tuple[tuple[int, int], Entry]] = []
        self._cursor = (self._course.first_row, 0)

    def _next_planned(self) -> Entry | None:
        while self._returned and self._returned[0][1].state is not State.PLANNED:
            heapq.heappop(self._returned)
        if self._returned:
            return self._returned[0][1]
        return next((entry for entry in self._fresh() if entry.state is State.PLANNED), None)

    def _fresh(self) -> Iterator[Entry]:
        """Entries from the cursor on; the cursor stays on the last one that was looked at."""
        index, place = self._cursor
        while self._course.start is not None and index < self._course.row_end:
            entries: Sequence[Entry] = () if self._course.is_committed(index) else self._open(index).entries
            for later in range(place, len(entries)):
                self._cursor = (index, later)
                yield entries[later]
            index, place = self._course.row_after(index), 0
            self._cursor = (index, place)

    def _open(self, index: int) -> OpenRow:
        row = self._rows.get(index)
        if row is None:
            plan = self._plan.rows[index]
            row = self._rows[index] = OpenRow(
                [
                    Entry((index, place), sample, plan.epoch, self._sizes[sample], self._attempt)
                    for place, sample in enumerate(plan.samples)
                ]
            )
            for entry in row.entries:
                if (entry.sample, entry.epoch) in self._skipped:
                    entry.state = State.SKIPPED
        return row

    def _position_bytes(self, position: int) -> int:
        rows = self._plan.rows[position * self._plan.ranks : (position + 1) * self._plan.ranks]
        return sum(self._sizes[sample] for row in rows for sample in row.samples)

    def _take_returned(self, entry: Entry) -> None:
        if self._returned and self._returned[0][1] is entry:
            heapq.heappop(self._returned)

    def _reuse(self, entry: Entry) -> bool:
        """The states kept from an earlier epoch serve a planned entry, if there are any."""
        kept = self._retained.take(entry.sample)
        if kept is None:
            return False
        self._take_returned(entry)
        entry.state, entry.key, entry.manifest = State.STORED, kept.key, kept.manifest
        self._enter(entry)
        return True

    def _has_room(self, entry: Entry) -> bool:
        """Whether the entry's bytes fit now; if not, what is kept for later epochs begins to leave."""
        if self._ledger.fits(entry.size_bytes):
            return True
        while self.held_bytes - self._ledger.leaving_bytes + entry.size_bytes > self.budget_bytes:
            kept = self._retained.drop_one(entry.order[0])
            if kept is None:
                break
            self._ledger.leave(kept.key, kept.handle)
        return False

    def _enter(self, entry: Entry) -> None:
        self._live[entry.key] = entry
        self._at_work.add(entry.sample)

    def _exit(self, entry: Entry) -> None:
        if self._live.pop(entry.key, None) is not None:
            self._at_work.discard(entry.sample)

    def _drop(self, entry: Entry) -> None:
        """Takes an entry's states out of the window: deleted now, or when their capture answers."""
        self._exit(entry)
        if entry.state in (State.STORED, State.DELIVERED):
            self._ledger.leave(entry.key, entry.handle)

    def _return(self, entry: Entry) -> None:
        entry.state, entry.gone = State.PLANNED, False
        entry.attempt += 1
        self._last_attempt = max(self._last_attempt, entry.attempt)
        heapq.heappush(self._returned, (entry.order, entry))

    def _count_failure(self, entry: Entry, reason: str) -> None:
        entry.failures += 1
        if entry.failures < self._attempts:
            self._return(entry)
            return
        entry.state = State.SKIPPED
        self._skipped[entry.sample, entry.epoch] = reason
