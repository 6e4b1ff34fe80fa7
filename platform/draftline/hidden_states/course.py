"""Where the ranks are in the plan: the order of positions, what each rank commits next, and where training begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftline.samples.plan import BatchPlan


@dataclass(slots=True)
class _Joining:
    """The ranks of a worker group that have said where they start."""

    group: str
    position: int
    ranks: set[int] = field(default_factory=set)


class Course:
    """Every rank takes the held-out positions first, then those from where training starts to the end.

    `end` is the first position that is not taken any more: the plan's end, or an earlier one (`finish_early`).
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self.start: int | None = None
        self.end = plan.positions
        self._finished = False
        self.untouched = True
        self._next = [0] * plan.ranks
        self._reached = 0  # the first position after all that were delivered since training started
        self._group = ""
        self._joining: _Joining | None = None

    @property
    def first_row(self) -> int:
        """Index in the plan of the first row of all."""
        return self._first * self._plan.ranks

    @property
    def row_end(self) -> int:
        """Index in the plan of the first row that is not taken any more."""
        return self.end * self._plan.ranks

    @property
    def _first(self) -> int:
        return 0 if self._plan.held_out_positions else self.start or 0

    def begin(self, position: int) -> None:
        """Training starts (again) at this position; ValueError when it is not one of a training step or the end."""
        held_out, end = self._plan.held_out_positions, self._plan.positions
        if not held_out <= position <= end:
            raise ValueError(f"training cannot start at position {position}: its positions are {held_out} to {end}")
        self.start = position
        self.untouched = True
        self._next = [self._first] * self._plan.ranks
        self._reached = 0

    def begin_again(self) -> None:
        """Training starts once more where it started, and nothing was used up: nobody has a row any more."""
        self._reached = 0

    def delivered(self, position: int) -> None:
        """Some rank has been given its row of this position."""
        self._reached = max(self._reached, position + 1)

    def finish_early(self) -> int:
        """Ends the course after the last position that any rank was given since training started; returns its end.

        The held-out positions, and what lies before the start, always belong to it. What was ended stays so, also
        when training starts again; an end that has been said never moves.
        """
        if not self._finished:
            self._finished = True
            self.end = max(self._plan.held_out_positions, self.start or 0, self._reached)
        return self.end

    def join(self, rank: int, position: int, group: str) -> bool | None:
        """One rank of a worker group says where it starts.

        True when that was the last one: training is to begin there. None when this group has begun before.
        """
        if group == self._group:
            return None
        if self._joining is None or self._joining.group != group:
            self._joining = _Joining(group, position)  # a group that was still gathering has died
        if self._joining.position != position:
            raise ValueError(f"rank {rank} starts at position {position}, the others at {self._joining.position}")
        self._joining.ranks.add(rank)
        if len(self._joining.ranks) < self._plan.ranks:
            return False
        self._group, self._joining = group, None
        return True

    def has_begun(self, group: str) -> bool:
        """True once all ranks of the group, the newest one, have joined. ValueError when a newer group came instead."""
        if group == self._group:
            return True
        if self._joining is None or self._joining.group != group:
            raise ValueError(f"worker group {group} was replaced by a newer one before all its ranks had joined")
        return False

    def row(self, rank: int, position: int) -> int:
        """Index in the plan of a row that the rank may ask for; ValueError otherwise."""
        plan = self._plan
        if self.start is None:
            raise ValueError("no train worker has said yet where training starts")
        if not 0 <= rank < plan.ranks or not self._next[rank] <= position < plan.positions:
            raise ValueError(
                f"rank {rank} asks for position {position}; there are {plan.ranks} ranks and {plan.positions} "
                "positions, and what was committed does not come again"
            )
        if plan.held_out_positions <= position < self.start:
            raise ValueError(f"rank {rank} asks for position {position}, but training starts at {self.start}")
        if position >= self.end:
            raise ValueError(f"rank {rank} asks for position {position}, but training ends before {self.end}")
        return position * plan.ranks + rank

    def is_committed(self, row: int) -> bool:
        """True when the row with this index has been used up."""
        return row // self._plan.ranks < self._next[row % self._plan.ranks]

    def is_ahead(self, rank: int, position: int) -> bool:
        """True when the rank has other positions to commit before this one."""
        return self._next[rank] < position

    def require_next(self, rank: int, position: int) -> None:
        """ValueError unless this is the position that the rank commits next."""
        if position != self._next[rank]:
            raise ValueError(f"rank {rank} commits position {position}, but {self._next[rank]} is its next")

    def commit(self, rank: int) -> None:
        """The rank has used up its next position."""
        self._next[rank] = self._after(self._next[rank])
        self.untouched = False

    def row_after(self, row: int) -> int:
        """Index of the row that follows in plan order; past the last row, the number of rows."""
        ranks = self._plan.ranks
        return row + 1 if row % ranks < ranks - 1 else self._after(row // ranks) * ranks

    def _after(self, position: int) -> int:
        return self.start or 0 if position == self._plan.held_out_positions - 1 else position + 1
