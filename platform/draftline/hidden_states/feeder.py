"""The feeder: drives the target replicas ahead of the train workers, inside the window. A thin shell around `Window`.

One per cell. It hands out manifests only; the tensors go from the replicas to the store and from there to the workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from draftline.errors import InputError, RunFailed
from draftline.hidden_states.access import StoreAccess
from draftline.hidden_states.capacity import StatesShape, store_capacity
from draftline.hidden_states.entries import Delivery, Lease, WindowLimits
from draftline.hidden_states.master import CLIENT_TTL_S
from draftline.hidden_states.skip_list import read_skip_list, write_skip_list
from draftline.hidden_states.store import StoreClient, StoreConfig, StoreUnavailable
from draftline.hidden_states.window import Window
from draftline.recipe.schema import HiddenStates
from draftline.samples.plan import BatchPlan
from draftline.telemetry.log import configure_logging

# A replica that takes longer for one sample hangs.
CAPTURE_TIMEOUT_S = 600.0
# A manifest comes before its states are written; states that take longer were not written.
ARRIVAL_S = 15.0
ARRIVAL_POLL_S = 0.005
WATCH_S = 1.0
# A store that was restarted or lost a segment is itself again after this time.
SETTLE_S = CLIENT_TTL_S + 2.0

log = logging.getLogger(__name__)


class ExtractionFailed(RunFailed):
    """Extraction cannot go on: no replica lives, the store is gone, or too many samples had to be skipped."""


class Feeder:
    """The actor's class, see `start_feeder`.

    `replicas` are handles with `capture(key, token_ids) -> manifest` and `healthy()`; `key_prefix` is new in every
    attempt at the run. With `master`, a Mooncake master that dies is started again. `skip_file` keeps what was given up
    for a later attempt. Extraction begins with the first restart(), or at once at training position `begin_at`.
    """

    def __init__(
        self,
        plan: BatchPlan,
        token_ids: Mapping[int, Sequence[int]],
        replicas: Sequence[Any],
        store: StoreConfig,
        states: HiddenStates,
        shape: StatesShape,
        key_prefix: str,
        master: Any = None,
        skip_file: str | None = None,
        begin_at: int | None = None,
    ) -> None:
        configure_logging()
        self._token_ids = token_ids
        self._states = states
        self._replicas = {f"replica {number}": replica for number, replica in enumerate(replicas)}
        self._skip_file = Path(skip_file) if skip_file else None
        self._window = Window(
            plan,
            {number: shape.sample_bytes(len(ids)) for number, ids in token_ids.items()},
            WindowLimits(
                min(states.window_bytes, store_capacity(states.segment_bytes, len(replicas))),
                states.concurrency,
                states.attempts,
            ),
            self._replicas,
            key_prefix,
            read_skip_list(self._skip_file) if self._skip_file else None,
        )
        self._skips_written = len(self._window.skipped)
        self._store = StoreAccess(StoreClient(store))
        self._captures: set[asyncio.Task[None]] = set()
        self._deletions: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._problem: ExtractionFailed | None = None
        self._settled_at = 0.0
        self._answered_at: dict[str, float] = {}  # by key, of what is in the store
        self._figures = {"captured_samples": 0, "captured_tokens": 0, "capture_s": 0.0, "lost_samples": 0} | {
            "failed_captures": 0,
            "replicas_lost": 0,
            "store_restarts": 0,
            "window_peak_bytes": 0,
        }
        if master is not None:
            self._begin(self._watch(master), self._watches)
        if begin_at is not None:
            self._window.begin(begin_at)
            self._move()

    # What train workers call

    async def restart(self, rank: int, position: int, group: str) -> None:
        """A train worker (re)starts at this training position. Returns once all ranks of its group have said so.

        `group` is a text that the ranks of one start of the worker group share, and no other start ever had.
        """
        self._window.join(rank, position, group)
        self._move()
        while not self._window.has_begun(group):
            await self._change()

    async def next_row(self, rank: int, position: int) -> list[Delivery]:
        """The row's samples, once all their states are in the store; without those that were skipped."""
        while True:
            while (row := self._window.deliver(rank, position)) is None:
                await self._change()
            if await self._arrived(row):
                return row

    async def commit(self, rank: int, position: int) -> None:
        """The row has been trained on: its states leave the store, or stay for a later epoch.

        Calls that a worker makes without waiting can arrive out of order: each waits for its turn.
        """
        starts = self._window.starts
        while self._window.comes_later(rank, position):
            await self._change()
            if self._window.starts != starts:
                raise ValueError(f"rank {rank} commits position {position} of a training that was started again")
        self._window.commit(rank, position)
        self._move()

    async def lost(self, key: str, reason: str) -> None:
        """Delivered states cannot be read: they are captured again, and the row is to be asked for again."""
        if self._window.lost(key, reason, blameless=self._unsettled()):
            self._figures["lost_samples"] += 1
            log.warning("hidden states %s are lost and captured again: %s", key, reason)
        self._move()

    # What the driver calls

    async def stats(self) -> dict[str, float]:
        """Figures so far; bytes by state are of now."""
        by_state = {f"window_{state}_bytes": size for state, size in self._window.bytes_by_state().items()}
        return {
            **self._figures,
            **by_state,
            "window_budget_bytes": self._window.budget_bytes,
            "skipped_samples": len(self._window.skipped),
            "replicas": len(self._window.replicas),
        }

    async def skipped(self) -> dict[tuple[int, int], str]:
        """Reason by (sample, epoch) of what was given up."""
        return self._window.skipped

    async def stop(self) -> None:
        """Lets captures go, waits for deletions under way, leaves the store. Who still waits gets ExtractionFailed."""
        self._fail("the feeder was stopped")
        for task in (*self._watches, *self._captures):
            task.cancel()
        await asyncio.gather(*self._watches, *self._captures, *self._deletions, return_exceptions=True)
        await self._store.close()

    # Inside

    def _move(self) -> None:
        """After every change: hands out captures, deletes what is to be deleted, wakes whoever waits."""
        self._write_skips()
        if self._problem is None:
            while any([self._lease(name) for name in sorted(self._window.replicas, key=self._window.in_flight)]):
                pass
        if leaving := self._window.take_leaving():
            self._begin(self._delete(leaving), self._deletions)
        peak = self._figures["window_peak_bytes"]
        self._figures["window_peak_bytes"] = max(peak, self._window.held_bytes)
        self._changed.set()
        self._changed = asyncio.Event()

    def _lease(self, name: str) -> bool:
        lease = self._window.lease(name)
        if lease is not None:
            self._begin(self._capture(name, lease), self._captures)
        return lease is not None

    async def _change(self) -> None:
        if self._problem is not None:
            raise self._problem
        await self._changed.wait()

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or ExtractionFailed(problem)
        self._changed.set()
        self._changed = asyncio.Event()

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits the feeder's own tasks: what one of them did not expect ends the run, not the task alone."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the feeder failed", exc_info=error)
            self._fail(f"the feeder failed: {type(error).__name__}: {error}")

    async def _capture(self, name: str, lease: Lease) -> None:
        token_ids = self._token_ids[lease.sample]
        began = time.monotonic()
        try:
            answer = self._replicas[name].capture.remote(lease.key, token_ids)
            manifest = await asyncio.wait_for(answer, CAPTURE_TIMEOUT_S)
        except RayActorError as error:
            self._lose_replica(name, _last_line(error))
        except TimeoutError:
            ray.kill(self._replicas[name])  # what it would still write is wanted no more
            self._lose_replica(name, f"no answer within {CAPTURE_TIMEOUT_S:g} s")
        except RayError as error:
            if await self._lives(name):
                self._figures["failed_captures"] += 1
                log.warning("capture %s failed: %s", lease.key, _last_line(error))
                self._window.failed(lease.key, _last_line(error))
            else:
                self._lose_replica(name, _last_line(error))
        else:
            self._window.stored(lease.key, manifest)
            self._answered_at[lease.key] = time.monotonic()
            self._figures["captured_samples"] += 1
            self._figures["captured_tokens"] += len(token_ids)
            self._figures["capture_s"] += time.monotonic() - began
        self._move()

    async def _lives(self, name: str) -> bool:
        """Whether a replica that failed can go on: its actor and its engine both live."""
        try:
            return bool(await self._replicas[name].healthy.remote())
        except RayError:
            return False

    def _lose_replica(self, name: str, reason: str) -> None:
        """Goes on without a replica. What lay in its segment is captured again."""
        if name not in self._window.replicas:
            return
        log.warning("%s is lost: %s", name, reason)
        self._figures["replicas_lost"] += 1
        self._settled_at = time.monotonic() + SETTLE_S
        self._window.replica_lost(name)
        left = len(self._window.replicas)
        if not left:
            self._fail(f"no target replica is left; {name}, the last one, was lost: {reason}")
            return
        self._begin(self._find_vanished(), self._watches)
        capacity = store_capacity(self._states.segment_bytes, left)
        if capacity < self._window.budget_bytes:
            try:
                self._window.shrink(capacity)
            except InputError as error:
                self._fail(f"{name} was lost ({reason}): {error}")

    async def _find_vanished(self) -> None:
        """Once the store knows that a segment is gone: looks for what was in it."""
        await asyncio.sleep(SETTLE_S)
        handles = self._window.handles()
        missing = set(await self._store.missing(list(handles.values())))
        self._window.vanished(key for key, handle in handles.items() if handle in missing)
        self._move()

    async def _arrived(self, row: Sequence[Delivery]) -> bool:
        """Waits for states on their way into the store. False: some did not arrive, and are captured again."""
        keys = {str(delivery.manifest["handle"]): delivery.key for delivery in row}
        deadline = max((self._answered_at.get(key, 0.0) for key in keys.values()), default=0.0) + ARRIVAL_S
        missing = await self._store.missing(list(keys))
        while missing and time.monotonic() < deadline:
            await asyncio.sleep(ARRIVAL_POLL_S)
            missing = await self._store.missing(missing)
        for handle in missing:
            await self.lost(keys[handle], f"not in the store {ARRIVAL_S:g} s after the replica's answer")
        return not missing

    async def _delete(self, leaving: Mapping[str, str]) -> None:
        try:
            await self._store.delete(list(leaving.values()))
        except StoreUnavailable as error:
            self._fail(f"the store is gone: {error}")
            return
        for key in leaving:
            self._window.released(key)
            self._answered_at.pop(key, None)
        self._move()

    async def _watch(self, master: Any) -> None:
        """Has a master that died started again; all that was stored is then captured again."""
        seen = await master.ensure.remote()
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                restarts = await master.ensure.remote()
            except RayError as error:
                self._fail(f"the Mooncake master is gone: {_last_line(error)}")
                return
            if restarts == seen:
                continue
            log.warning("the Mooncake master died and was started again")
            self._figures["store_restarts"] += restarts - seen
            seen = restarts
            self._settled_at = time.monotonic() + SETTLE_S
            await asyncio.sleep(WATCH_S)  # replicas join the new master within a second
            self._window.store_lost()
            self._move()

    def _unsettled(self) -> bool:
        """True while losses are the store's fault and not the samples'."""
        return time.monotonic() < self._settled_at

    def _write_skips(self) -> None:
        """What was given up is on disk before anybody gets a row without it."""
        skipped = self._window.skipped
        if len(skipped) == self._skips_written:
            return
        if self._skip_file is not None:
            write_skip_list(self._skip_file, skipped)
        self._skips_written = len(skipped)
        if self._window.skipped_share > self._states.max_skipped_share:
            (sample, _), reason = next(iter(skipped.items()))
            self._fail(
                f"{len(skipped)} sample(s) could not be extracted, more than hidden_states.max_skipped_share "
                f"({self._states.max_skipped_share}) allows; the first is sample {sample}: {reason}"
            )


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def start_feeder(*args: Any, **kwargs: Any) -> Any:
    """A started feeder actor; the arguments are `Feeder`'s. It takes no CPU of Ray's count, and many calls at once."""
    return ray.remote(Feeder).options(num_cpus=0, max_restarts=0, max_concurrency=1000).remote(*args, **kwargs)
