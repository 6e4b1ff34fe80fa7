"""A rank's rows, read ahead: asks the feeder for manifests and reads the tensors from the store, in its own thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from draftline.errors import one_line
from draftline.hidden_states.store import StatesLost, StatesReader, StoreUnavailable
from draftline.training.failures import FeederGone
from draftline.training.rows import SampleStates
from draftline.training.spec import token_digest

READ_TIMEOUT_S = 1.0  # the feeder delivers what has arrived: what is not there was lost meanwhile, and does not come
POLL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
# How long a store may refuse this reader: another master takes the place of one that is lost within less.
REFUSED_S = 90.0

log = logging.getLogger(__name__)


class FeederRows:
    """`RowSource` on top of the feeder: the held-out rows first, then the row of each step from `first_step` on.

    `group` names this start of the worker group, the same for all its ranks. `connect` makes the reader for the store
    at a master's address; it is called in the reading thread, the only one that uses the reader. Close it when training
    ends, also when it fails. A feeder that died shows as FeederGone. States of samples in `token_digests` (see
    `spec.token_digest`) must be of those token ids.
    """

    def __init__(
        self,
        feeder: Any,
        connect: Callable[[str], StatesReader],
        prompt_tokens: Mapping[int, int],
        *,
        group: str,
        rank: int,
        first_step: int,
        steps: int,
        held_out_positions: int,
        prefetch: int,
        token_digests: Mapping[int, int] | None = None,
    ) -> None:
        self._feeder, self._connect, self._prompt_tokens = feeder, connect, prompt_tokens
        self._group, self._rank, self._first_step, self._steps = group, rank, first_step, steps
        self._held_out_positions = held_out_positions
        self._token_digests = token_digests or {}
        self._reader: StatesReader | None = None
        self._ahead: queue.Queue[tuple[int, list[SampleStates] | BaseException | None]] = queue.Queue(prefetch)
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
            row = self._next(position)
            if row is None:
                raise RuntimeError(f"the feeder ended training at position {position}, before the held-out rows did")
            rows.append(row)
            self._commit(position)
        return rows

    def row(self, step: int) -> Sequence[SampleStates] | None:
        """The row of `step`; waits for it. None: training ends before it. Raises what the reading thread met."""
        return self._next(self._held_out_positions + step)

    def commit(self, step: int) -> None:
        """Tells the feeder that the row of `step` is used up; returns at once."""
        self._commit(self._held_out_positions + step)

    def close(self) -> None:
        """Ends the reading thread and waits a little for the commits under way, which a dead feeder wants no more."""
        self._closing.set()
        try:
            ray.get(self._commits, timeout=CLOSE_TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            log.warning("the last commits did not reach the feeder: %s", one_line(error))
        self._thread.join(CLOSE_TIMEOUT_S)  # it may hang in a read; as a daemon it ends with the process

    def _next(self, position: int) -> Sequence[SampleStates] | None:
        got, samples = self._ahead.get()
        if isinstance(samples, BaseException):
            raise samples
        if got != position:
            raise RuntimeError(f"row {position} was asked for, but rows come in order and {got} is next")
        return samples

    def _commit(self, position: int) -> None:
        if self._commits:
            done, self._commits = ray.wait(self._commits, num_returns=len(self._commits), timeout=0)
            _answer(done)  # raises what a commit met
        self._commits.append(self._feeder.commit.remote(self._rank, position))

    def _positions(self) -> Iterator[int]:
        yield from range(self._held_out_positions)
        yield from range(self._held_out_positions + self._first_step, self._held_out_positions + self._steps)

    def _read_ahead(self) -> None:
        position = 0
        try:
            first = self._held_out_positions + self._first_step
            _answer(self._feeder.restart.remote(self._rank, first, self._group))
            for position in self._positions():
                row = self._fetch(position)
                if not self._put(position, row) or row is None:
                    return
        except BaseException as error:  # noqa: BLE001 - handed over whole: the train loop's next row raises it
            self._put(position, error)

    def _put(self, position: int, item: list[SampleStates] | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put((position, item), timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _fetch(self, position: int) -> list[SampleStates] | None:
        """The samples of a row in the plan's order; None when training ends before it.

        What the store lost is captured again and asked for again.
        """
        have: dict[str, SampleStates] = {}
        refused_since: float | None = None
        while True:
            deliveries = _answer(self._feeder.next_row.remote(self._rank, position))
            if deliveries is None:
                return None
            whole = True
            for delivery in deliveries:
                if delivery.key in have:
                    continue
                try:
                    have[delivery.key] = self._read(delivery)
                except StatesLost as error:
                    whole = False
                    _answer(self._feeder.lost.remote(delivery.key, error.reason))
                except StoreUnavailable:
                    # The row that is asked for next may name another store.
                    whole = False
                    refused_since = refused_since or time.monotonic()
                    if self._closing.is_set() or time.monotonic() - refused_since > REFUSED_S:
                        raise
                    time.sleep(POLL_S)
                    break
            if whole:
                return [have[delivery.key] for delivery in deliveries]

    def _read(self, delivery: Any) -> SampleStates:
        if self._reader is None:
            self._reader = self._connect(delivery.store)
        self._reader.rejoin(delivery.store)
        states = self._reader.read(delivery.manifest, READ_TIMEOUT_S)
        number, token_ids = delivery.sample, states["token_ids"]
        # The ids themselves stay with the feeder: all of them would be as much again as the samples.
        if number in self._token_digests and token_digest(token_ids.tolist()) != self._token_digests[number]:
            raise StatesLost(delivery.key, f"they are not those of sample {number}: its token ids are other ones")
        return SampleStates(states["hidden_states"], token_ids, self._prompt_tokens[number], number)


def _answer(call: Any) -> Any:
    """What the feeder answers. Raises FeederGone when it is dead or out of reach."""
    try:
        return ray.get(call)
    except RayActorError as error:
        raise FeederGone(f"the feeder is gone: {one_line(error)}") from error
