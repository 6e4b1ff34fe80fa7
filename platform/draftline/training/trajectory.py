"""The trajectory of a training: which samples every step used, and whether that is what the plan asks for."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from draftline.samples.plan import BatchPlan

_NAMED = 5  # numbers that a message lists


class Trajectory:
    """For every step, from the first on, the sample numbers that each rank used, in row order.

    Kept in flat arrays: 8 bytes for a sample and 4 for a row, however many epochs there are.
    """

    def __init__(self, steps: Iterable[Sequence[Sequence[int]]] = ()) -> None:
        self._ranks = 0
        self._counts = array("I")
        self._samples = array("q")
        for by_rank in steps:
            self.append(by_rank)

    def append(self, by_rank: Sequence[Sequence[int]]) -> None:
        """Adds the next step. ValueError when it has another number of ranks than the steps before it."""
        self._ranks = self._ranks or len(by_rank)
        if not by_rank or len(by_rank) != self._ranks:
            raise ValueError(f"step {len(self)} has {len(by_rank)} ranks, those before it {self._ranks}")
        for samples in by_rank:
            self._counts.append(len(samples))
            self._samples.extend(samples)

    def __len__(self) -> int:
        return len(self._counts) // self._ranks if self._ranks else 0

    def __iter__(self) -> Iterator[list[list[int]]]:
        begin, step = 0, []
        for count in self._counts:
            step.append(self._samples[begin : begin + count].tolist())
            begin += count
            if len(step) == self._ranks:
                yield step
                step = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # it grows


def consumption_problems(
    consumed: Iterable[Sequence[Sequence[int]]], plan: BatchPlan, skipped: Collection[tuple[int, int]] = ()
) -> list[str]:
    """What a trajectory lost, repeated or used besides the plan, epoch by epoch; empty when it is the plan's own.

    `consumed`: for every step a list over ranks of sample numbers; `skipped`: the (sample, epoch) that were given up.
    A training that ended early has lost what it did not reach.
    """
    wanted: dict[int, Counter[int]] = {}
    used: dict[int, Counter[int]] = {}
    skips, displaced, steps, beyond = set(skipped), [], 0, 0
    for row in plan.rows[plan.held_out_positions * plan.ranks :]:
        wanted.setdefault(row.epoch, Counter()).update(_kept(row.samples, row.epoch, skips))
    for step, by_rank in enumerate(consumed):
        if step >= plan.steps:
            beyond += 1
            continue
        steps += 1
        if len(by_rank) != plan.ranks:
            return [f"step {step} has {len(by_rank)} ranks, the plan {plan.ranks}"]
        for rank, samples in enumerate(by_rank):
            row = plan.row(plan.held_out_positions + step, rank)
            used.setdefault(row.epoch, Counter()).update(samples)
            if list(samples) != _kept(row.samples, row.epoch, skips):
                displaced.append((step, rank))
    problems = [f"{beyond} step(s) beyond the plan's {plan.steps}"] if beyond else []
    if steps < plan.steps:
        problems.append(f"only {steps} of {plan.steps} steps")
    for epoch, expected in sorted(wanted.items()):
        found = used.get(epoch, Counter())
        problems += _told(epoch, "lost", expected - found)
        problems += _told(epoch, "repeated", Counter({n: c - 1 for n, c in found.items() if n in expected and c > 1}))
        problems += _told(epoch, "not to be used", Counter({n: c for n, c in found.items() if n not in expected}))
    if displaced and not problems:
        step, rank = displaced[0]
        problems.append(f"{len(displaced)} row(s) differ from the plan's, the first at step {step}, rank {rank}")
    return problems


def _kept(samples: Iterable[int], epoch: int, skips: Collection[tuple[int, int]]) -> list[int]:
    return [number for number in samples if (number, epoch) not in skips]


def _told(epoch: int, what: str, numbers: Counter[int]) -> list[str]:
    if not numbers:
        return []
    named = ", ".join(map(str, sorted(numbers)[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
    return [f"epoch {epoch}: {numbers.total()} {what}: {named}"]
