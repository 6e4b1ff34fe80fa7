"""A rank's rows, read ahead: asks the feeder for manifests and reads the tensors from the store, in its own thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray

from draftline.hidden_states.store import StatesLost, StatesReader
from draftline.training.rows import SampleStates

READ_TIMEOUT_S = 120.0
POLL_S = 1.0
CLOSE_TIMEOUT_S = 5.0


class FeederRows:
    """`RowSource` on top of the feeder: the held-out rows first, then the row of each step from `first_step` on.

    `group` names this start of the worker group, the same for all its ranks. `connect` makes the reader; it is called
    in the reading thread, the only one that uses it. Close it when training ends, also when it fails.
    """

    def __init__(
        self,
        feeder: Any,
        connect: Callable[[], StatesReader],
        prompt_tokens: Mapping[int, int],
        *,
        group: str,
        rank: int,
        first_step: int,
        steps: int,
        held_out_positions: int,
        prefetch: int,
    ) -> None:
        self._feeder, self._connect, self._prompt_tokens = feeder, connect, prompt_tokens
        self._group, self._rank, self._first_step, self._steps = group, rank, first_step, steps
        self._held_out_positions = held_out_positions
        self._ahead: queue.Queue[tuple[int, list[SampleStates] | BaseException]] = queue.Queue(prefetch)
        self._closing = threading.Event()
        self._commits: list[Any] = []
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)
        self._thread.start()

    def held_out(self) -> list[Sequence[SampleStates]]:
        """All held-out rows of this rank. They stay in the worker's memory, so each is committed at once.

        Asked for once, before the first step.
        """
        rows = []
        for position in range(self._held_out_positions):
            rows.append(self._next(position))
            self._commit(position)
        return rows

    def row(self, step: int) -> Sequence[SampleStates]:
        """The row of `step`; waits for it. Raises what the reading thread met."""
        return self._next(self._held_out_positions + step)

    def commit(self, step: int) -> None:
        """Tells the feeder that the row of `step` is used up; returns at once."""
        self._commit(self._held_out_positions + step)

    def close(self) -> None:
        """Ends the reading thread and waits for the commits under way."""
        self._closing.set()
        ray.get(self._commits, timeout=CLOSE_TIMEOUT_S)
        self._thread.join(CLOSE_TIMEOUT_S)  # it may hang in a read; as a daemon it ends with the process

    def _next(self, position: int) -> Sequence[SampleStates]:
        got, samples = self._ahead.get()
        if isinstance(samples, BaseException):
            raise samples
        if got != position:
            raise RuntimeError(f"row {position} was asked for, but rows come in order and {got} is next")
        return samples

    def _commit(self, position: int) -> None:
        if self._commits:
            done, self._commits = ray.wait(self._commits, num_returns=len(self._commits), timeout=0)
            ray.get(done)  # raises what a commit met
        self._commits.append(self._feeder.commit.remote(self._rank, position))

    def _positions(self) -> Iterator[int]:
        yield from range(self._held_out_positions)
        yield from range(self._held_out_positions + self._first_step, self._held_out_positions + self._steps)

    def _read_ahead(self) -> None:
        position = 0
        try:
            reader = self._connect()
            first = self._held_out_positions + self._first_step
            ray.get(self._feeder.restart.remote(self._rank, first, self._group))
            for position in self._positions():
                if not self._put(position, self._fetch(reader, position)):
                    return
        except BaseException as error:  # noqa: BLE001 - handed over whole: the train loop's next row raises it
            self._put(position, error)

    def _put(self, position: int, item: list[SampleStates] | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put((position, item), timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _fetch(self, reader: StatesReader, position: int) -> list[SampleStates]:
        """The samples of a row in the plan's order. What the store lost is extracted again and asked for again."""
        have: dict[str, SampleStates] = {}
        while True:
            deliveries = ray.get(self._feeder.next_row.remote(self._rank, position))
            lost = False
            for delivery in deliveries:
                if delivery.key in have:
                    continue
                try:
                    have[delivery.key] = self._read(reader, delivery)
                except StatesLost as error:
                    lost = True
                    ray.get(self._feeder.lost.remote(delivery.key, error.reason))
            if not lost:
                return [have[delivery.key] for delivery in deliveries]

    def _read(self, reader: StatesReader, delivery: Any) -> SampleStates:
        states = reader.read(delivery.manifest, READ_TIMEOUT_S)
        return SampleStates(states["hidden_states"], states["token_ids"], self._prompt_tokens[delivery.sample])
