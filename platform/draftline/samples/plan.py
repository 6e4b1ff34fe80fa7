"""The batch plan: which samples make up the row of each position and rank. Pure: same input, same plan."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from draftline.errors import InputError

HELD_OUT_EPOCH = -1
# Rows that packing keeps open at once: more fill rows better, fewer keep neighbours in the shuffled order apart.
_OPEN_ROWS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank takes at one position; `samples` is empty where there is nothing left for this rank."""

    position: int
    rank: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Rows ordered by (position, rank), one for every rank of every position.

    Positions 0..held_out_positions-1 are held-out rows; position held_out_positions + s is training step s.
    """

    rows: tuple[Row, ...]
    ranks: int
    held_out_positions: int
    steps: int

    @property
    def positions(self) -> int:
        """Held-out positions and training steps together."""
        return self.held_out_positions + self.steps

    def row(self, position: int, rank: int) -> Row:
        """The row of a position and rank."""
        if not (0 <= position < self.positions and 0 <= rank < self.ranks):
            raise ValueError(
                f"there is no row at position {position}, rank {rank}: the plan has {self.positions} positions and "
                f"{self.ranks} ranks"
            )
        return self.rows[position * self.ranks + rank]


def plan_rows(
    lengths: Mapping[int, int],
    held_out: Sequence[int],
    *,
    row_tokens: int,
    ranks: int,
    epochs: int,
    seed: int,
    wave: int = 0,
) -> BatchPlan:
    """Packs samples (number -> tokens) into rows of at most `row_tokens` tokens.

    Every sample that is not held out comes exactly once per epoch, in an order that `seed`, `wave` and the epoch
    decide; the held-out ones come once, before the training steps. Raises InputError for a sample longer than a row.
    """
    too_long = {number: tokens for number, tokens in lengths.items() if tokens > row_tokens}
    if too_long:
        number, tokens = max(too_long.items(), key=lambda item: item[1])
        raise InputError(
            f"sample {number} has {tokens} tokens ({len(too_long)} samples are too long); allowed: at most "
            f"{row_tokens} (training.row_tokens)"
        )
    aside = set(held_out)
    rows = _spread(_pack(sorted(aside), lengths, row_tokens), ranks, HELD_OUT_EPOCH, first=0)
    held_out_positions = len(rows) // ranks
    train = sorted(set(lengths) - aside)
    for epoch in range(epochs):
        # A text as seed is hashed the same way by every Python version and process.
        dice = random.Random(f"{seed}/{wave}/{epoch}")
        order = dice.sample(train, len(train))
        packed = _pack(order, lengths, row_tokens)
        dice.shuffle(packed)  # packing closes full rows first
        rows += _spread(packed, ranks, epoch, first=len(rows) // ranks)
    return BatchPlan(tuple(rows), ranks, held_out_positions, len(rows) // ranks - held_out_positions)


def _pack(order: Iterable[int], lengths: Mapping[int, int], row_tokens: int) -> list[tuple[int, ...]]:
    """Best fit: each sample joins the open row that it fills most tightly, or opens one."""
    closed: list[list[int]] = []
    room: list[int] = []  # free tokens of the open rows, increasing
    open_rows: list[list[int]] = []
    for number in order:
        tokens = lengths[number]
        place = bisect.bisect_left(room, tokens)
        if place < len(room):
            left, row = room.pop(place) - tokens, open_rows.pop(place)
        else:
            left, row = row_tokens - tokens, []
            if len(room) >= _OPEN_ROWS:
                room.pop(0)
                closed.append(open_rows.pop(0))
        row.append(number)
        place = bisect.bisect_left(room, left)
        room.insert(place, left)
        open_rows.insert(place, row)
    return [tuple(row) for row in closed + open_rows]


def _spread(packed: Sequence[tuple[int, ...]], ranks: int, epoch: int, *, first: int) -> list[Row]:
    """Deals packed rows out to the ranks, position by position from `first` on; the last ones may stay empty."""
    positions = -(-len(packed) // ranks)
    padded = [*packed, *[()] * (positions * ranks - len(packed))]
    return [Row(first + index // ranks, index % ranks, epoch, samples) for index, samples in enumerate(padded)]
