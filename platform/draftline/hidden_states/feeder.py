"""The feeder: drives the target replicas ahead of the train workers, inside the window. A thin shell around `Window`.

One per cell. It hands out manifests only; the tensors go from the replicas to the store and from there to the workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from draftline.errors import InputError, RunFailed
from draftline.hidden_states.access import StoreAccess
from draftline.hidden_states.arrivals import ARRIVAL_S, SETTLE_S, Arrivals
from draftline.hidden_states.capacity import StatesShape, store_capacity
from draftline.hidden_states.entries import Delivery, Lease, WindowLimits
from draftline.hidden_states.incidents import Incidents, LostPart
from draftline.hidden_states.replicas import (
    HEALTH_EVERY_S,
    REJOIN_TIMEOUT_S,
    CaptureRefused,
    ReplicaLost,
    capture,
    rejoin,
    trouble,
)
from draftline.hidden_states.skip_list import SkipList
from draftline.hidden_states.store import StoreClient, StoreConfig, StoreUnavailable
from draftline.hidden_states.watch import MASTER_WAIT_S, WATCH_S, MasterWatch
from draftline.hidden_states.window import Window
from draftline.recipe.schema import HiddenStates
from draftline.samples.plan import BatchPlan
from draftline.storage.store import DiskFull, StoreFailed
from draftline.telemetry.log import configure_logging

ARRIVAL_POLL_S = 0.005
# A dead replica says so at once; one that hangs is not waited for when states were lost.
LOOK_S = 2.0
# When states are looked for that replicas still wrote for an earlier feeder: pauses since the start and each other.
LATE_S = (5.0, 20.0, 60.0, 240.0)
# What can be had again, by whoever starts another feeder: told as it is. The rest ends the run.
LOSSES = (StoreUnavailable, StoreFailed, DiskFull)

_MISSING = f"not in the store {ARRIVAL_S:g} s after the replica's answer"

log = logging.getLogger(__name__)


class ExtractionFailed(RunFailed):
    """Extraction cannot go on: too many samples had to be skipped, the window is too small, or a mistake of ours."""


class Feeder:
    """The actor's class, see `start_feeder`.

    `replicas` are handles with `capture(key, token_ids) -> manifest`, `healthy()` and `rejoin(master_address)`;
    `key_prefix` is new for every feeder. With `master`, a Mooncake master that dies is started again. `skip_list` keeps
    what was given up for a later attempt. Extraction begins with the first restart(), or at once at training position
    `begin_at`. When no replica is left, it goes on once one is added.

    Whoever waits is told when it cannot go on: ExtractionFailed, or the StoreUnavailable, StoreFailed or DiskFull that
    another feeder may not meet.

    The store is this feeder's alone: whatever lies there at the start is removed. `predecessors` are the key prefixes
    of feeders that were killed: what replicas still write for them is removed as well.
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
        skip_list: SkipList | None = None,
        begin_at: int | None = None,
        predecessors: Sequence[str] = (),
    ) -> None:
        configure_logging()
        self._token_ids = token_ids
        self._states = states
        self._numbers = itertools.count()
        self._replicas = {self._new_name(): replica for replica in replicas}
        self._skip_list = skip_list
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
            skip_list.read() if skip_list else None,
        )
        self._skips_written = len(self._window.skipped)
        self._skips_writer: asyncio.Task[None] | None = None
        self._first_address = self._address = store.master_address
        client = StoreClient(store)
        if removed := client.clear():
            log.warning("the store held %d objects of an earlier feeder; they were removed", removed)
        self._store = StoreAccess(client)
        self._incidents = Incidents()
        self._master_missed = False
        self._captures: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._groups: set[str] = set()
        self._problem: Exception | None = None
        self._arrivals = Arrivals()
        self._figures = {"captured_samples": 0, "captured_tokens": 0, "capture_s": 0.0, "lost_samples": 0} | {
            "failed_captures": 0,
            "replicas_lost": 0,
            "store_restarts": 0,
            "window_peak_bytes": 0,
        }
        self._master_watch: MasterWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        for name, replica in self._replicas.items():
            self._begin(self._watch_replica(name, replica), self._watches)
        if master is not None:
            self._watch(master)
        if predecessors:
            self._begin(self._clear_late(predecessors), self._watches)
        if begin_at is not None:
            self._window.begin(begin_at)
            self._move()

    # What train workers call

    async def restart(self, rank: int, position: int, group: str) -> None:
        """A train worker (re)starts at this training position. Returns once all ranks of its group have said so.

        `group` is a text that the ranks of one start of the worker group share, and no other start ever had. After
        finish_early() the end stays: a group that starts before it trains on up to it, one that starts at or behind it
        gets its held-out rows only.
        """
        self._window.join(rank, position, group)
        self._groups.add(group)
        self._move()
        while not self._window.has_begun(group):
            await self._change()

    async def next_row(self, rank: int, position: int) -> list[Delivery] | None:
        """The row's samples, once all their states are in the store; without those that were skipped.

        None, at once, for a position that is left out because training ends early: see finish_early().
        """
        while not self._window.is_over(position):
            row = self._window.deliver(rank, position)
            if row is None or self._skips_written < len(self._window.skipped):
                await self._change()
            elif await self._arrived(row):
                return [replace(delivery, store=self._address) for delivery in row]
        return None

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
        # A master or a replica that has just died explains it. The store answers once there is a master, and then its
        # watch knows.
        if self._master_watch is not None:
            await self._store.missing([key])
        if (watch := self._master_watch) is not None:  # none while another one takes over
            await watch.check()
        checks = [self._begin(self._check(name, replica), self._watches) for name, replica in self._replicas.items()]
        if checks:
            await asyncio.wait(checks, timeout=LOOK_S)
        if self._window.lost(key, reason, blameless=self._arrivals.blameless(key)):
            self._figures["lost_samples"] += 1
            self._note("state", f"hidden states {key} are lost and captured again: {reason}")
        self._move()

    # What the driver calls

    async def add_replica(self, replica: Any) -> str:
        """A new replica takes part, and the window grows by its segment, at most to its first size; returns its name.

        One that joined the store of a master that was replaced since is moved; if it cannot, it is lost at once.
        """
        name = self._new_name()
        self._replicas[name] = replica
        if self._address != self._first_address:
            await self._rejoin(name, replica)
        if name in self._replicas:
            self._begin(self._watch_replica(name, replica), self._watches)
            self._window.add_replica(name)
            self._fit_budget(f"{name} was added")
            log.info("%s was added", name)
        self._move()
        return name

    async def attach_master(self, master: Any) -> None:
        """Another Mooncake master, which has been started, takes the place of one that is gone.

        Replicas move to its address when that is a new one, and readers with their next delivery. All that was stored
        is captured again.
        """
        address = await master.address.remote()
        if self._watching is not None:
            self._watching.cancel()
        self._master_watch = None
        self._arrivals.unsettle(time.monotonic(), REJOIN_TIMEOUT_S)
        if address != self._address:
            self._address = address
            moves = [self._rejoin(name, replica) for name, replica in self._replicas.items()]
            try:
                await asyncio.gather(self._store.rejoin(address), *moves)
            except StoreUnavailable as error:
                raise self._fail(error) from None
        await self._restarted(1, f"the Mooncake master was lost; another one took over, at {address}")
        self._watch(master)

    async def finish_early(self) -> int:
        """Training ends with the last position that any rank was given since it started; returns the one after it.

        Rows before it are still delivered, also the held-out ones; for those behind, next_row() says None, and nothing
        more of them is extracted. Calling it again changes nothing.
        """
        end = self._window.finish_early()
        self._move()
        return end

    async def stats(self) -> dict[str, Any]:
        """Figures so far; bytes by state are of now. `incidents` holds the newest (cause, text) of `incidents_total`.

        The causes are "replica", "master" and "state"; each loss is one incident. `worker_starts` counts the worker
        groups that have said where they start.
        """
        by_state = {f"window_{state}_bytes": size for state, size in self._window.bytes_by_state().items()}
        return {
            **self._figures,
            **by_state,
            "window_budget_bytes": self._window.budget_bytes,
            "worker_starts": len(self._groups),
            "skipped_samples": len(self._window.skipped),
            "replicas": len(self._window.replicas),
            "incidents": self._incidents.newest(),
            "incidents_total": self._incidents.total,
        }

    async def stop(self) -> None:
        """Lets captures go, waits for writes under way, leaves the store. Who still waits gets ExtractionFailed."""
        self._fail(ExtractionFailed("the feeder was stopped"))
        for task in (*self._watches, *self._captures):
            task.cancel()
        await asyncio.gather(*self._watches, *self._captures, *self._writes, return_exceptions=True)
        await self._store.close()

    # Inside

    def _move(self) -> None:
        """After every change: hands out captures, deletes what is to be deleted, wakes whoever waits."""
        self._note_skips()
        if self._problem is None:
            while any([self._lease(name) for name in sorted(self._window.replicas, key=self._window.in_flight)]):
                pass
        if leaving := self._window.take_leaving():
            self._begin(self._delete(leaving), self._writes)
        peak = self._figures["window_peak_bytes"]
        self._figures["window_peak_bytes"] = max(peak, self._window.held_bytes)
        self._changed.set()
        self._changed = asyncio.Event()

    def _lease(self, name: str) -> bool:
        lease = self._window.lease(name)
        if lease is not None:
            self._begin(self._capture(name, self._replicas[name], lease), self._captures)
        return lease is not None

    async def _change(self) -> None:
        if self._problem is not None:
            raise self._problem
        await self._changed.wait()

    def _fail(self, problem: Exception) -> Exception:
        """Everybody who waits is told; returns what they are told, which is the first problem of all."""
        self._problem = self._problem or problem
        self._changed.set()
        self._changed = asyncio.Event()
        return self._problem

    def _note(self, part: LostPart, text: str) -> None:
        log.warning("%s", text)
        self._incidents.add(part, text)

    def _new_name(self) -> str:
        return f"replica {next(self._numbers)}"

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits the feeder's own tasks: what one of them did not expect ends it all, not the task alone."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, LOSSES):
            self._fail(error)
            return
        log.error("the feeder failed", exc_info=error)
        self._fail(ExtractionFailed(f"the feeder failed: {type(error).__name__}: {error}"))

    async def _capture(self, name: str, replica: Any, lease: Lease) -> None:
        token_ids = self._token_ids[lease.sample]
        began = time.monotonic()
        try:
            manifest = await capture(replica, lease.key, token_ids)
        except ReplicaLost as lost:
            self._lose_replica(name, str(lost))
        except CaptureRefused as refused:
            self._figures["failed_captures"] += 1
            self._note("state", f"capture {lease.key} failed: {refused}")
            self._window.failed(lease.key, str(refused))
        else:
            self._window.stored(lease.key, manifest)
            self._arrivals.answered(lease.key, time.monotonic())
            self._figures["captured_samples"] += 1
            self._figures["captured_tokens"] += len(token_ids)
            self._figures["capture_s"] += time.monotonic() - began
        self._move()

    async def _watch_replica(self, name: str, replica: Any) -> None:
        """Goes on without a replica once it has died, also when nothing is asked of it."""
        while name in self._replicas:
            await self._check(name, replica)
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _check(self, name: str, replica: Any) -> None:
        if (problem := await trouble(replica)) is not None:
            self._lose_replica(name, problem)
            self._move()

    def _lose_replica(self, name: str, reason: str) -> None:
        """Goes on without a replica. What lay in its segment is captured again."""
        if self._replicas.pop(name, None) is None:
            return
        self._note("replica", f"{name} is lost: {reason}")
        self._figures["replicas_lost"] += 1
        self._arrivals.unsettle(time.monotonic())
        self._window.replica_lost(name)
        if not self._window.replicas:
            self._window.store_lost()  # no segment is left
            return
        self._begin(self._find_vanished(), self._watches)
        self._fit_budget(f"{name} was lost ({reason})")

    def _fit_budget(self, why: str) -> None:
        """The window follows the segments that there are."""
        capacity = store_capacity(self._states.segment_bytes, len(self._window.replicas))
        if capacity >= self._window.budget_bytes:
            self._window.grow(capacity)
            return
        try:
            self._window.shrink(capacity)
        except InputError as error:
            self._fail(ExtractionFailed(f"{why}: {error}"))

    async def _rejoin(self, name: str, replica: Any) -> None:
        """Moves a replica to the store's present address. One that cannot is lost."""
        try:
            await rejoin(replica, self._address)
        except ReplicaLost as lost:
            self._lose_replica(name, str(lost))

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
        restarts, missing = self._figures["store_restarts"], list(keys)
        try:
            while missing := await self._store.missing(missing):
                # A store that was restarted meanwhile has lost what was there, and nothing more is written there.
                restarted = self._figures["store_restarts"] != restarts
                lost = [keys[handle] for handle in missing]
                late = lost if restarted else self._arrivals.late(lost, time.monotonic())
                for key in late:
                    await self.lost(key, "the store was restarted" if restarted else _MISSING)
                if late:
                    return False
                await asyncio.sleep(ARRIVAL_POLL_S)
        except StoreUnavailable as error:
            raise self._fail(error) from None
        return True

    async def _delete(self, leaving: Mapping[str, str]) -> None:
        try:
            await self._store.delete(list(leaving.values()))
        except StoreUnavailable as error:
            self._fail(error)
            return
        for key in leaving:
            self._window.released(key)
            self._arrivals.forget(key)
        self._move()

    async def _clear_late(self, key_prefixes: Sequence[str]) -> None:
        """Removes what replicas still wrote for feeders that are gone."""
        for pause_s in LATE_S:
            await asyncio.sleep(pause_s)
            for key_prefix in key_prefixes:
                if removed := await self._store.clear_prefixed(key_prefix):
                    log.warning("%d late objects of the earlier feeder %s were removed", removed, key_prefix)

    def _watch(self, master: Any) -> None:
        """Has a master that died started again; all that was stored is then captured again."""

        async def restarted(times: int) -> None:
            await self._restarted(times, "the Mooncake master died and was started again")

        self._master_watch = MasterWatch(master, self._master_gone, restarted)
        self._watching = self._begin(self._master_watch.run(), self._watches)

    def _master_gone(self, problem: str) -> None:
        self._master_missed = True
        self._note("master", f"{problem}; another one may be attached within {MASTER_WAIT_S:g} s")
        self._arrivals.unsettle(time.monotonic(), MASTER_WAIT_S)

    async def _restarted(self, times: int, what: str) -> None:
        """The store is empty, and its clients are about to be there again."""
        if self._master_missed:  # one loss is one incident
            log.warning("%s", what)
        else:
            self._note("master", what)
        self._master_missed = False
        self._figures["store_restarts"] += times
        self._arrivals.unsettle(time.monotonic())
        await asyncio.sleep(WATCH_S)  # replicas join a new master at the old address within a second
        self._window.store_lost()
        self._move()

    def _note_skips(self) -> None:
        """Has what was given up written down, and ends the run when that is too much."""
        skipped = self._window.skipped
        if len(skipped) == self._skips_written or self._problem is not None:
            return
        if self._skips_writer is None or self._skips_writer.done():
            self._skips_writer = self._begin(self._write_skips(), self._writes)
        if self._window.skipped_share > self._states.max_skipped_share:
            (sample, _), reason = next(iter(skipped.items()))
            self._fail(
                ExtractionFailed(
                    f"{len(skipped)} sample(s) could not be extracted, more than hidden_states.max_skipped_share "
                    f"({self._states.max_skipped_share}) allows; the first is sample {sample}: {reason}"
                )
            )

    async def _write_skips(self) -> None:
        """What was given up is in the artifact store before anybody gets a row without it, see next_row()."""
        while self._skips_written < len(skipped := self._window.skipped):
            if self._skip_list is not None:
                await asyncio.to_thread(self._skip_list.write, skipped)
            self._skips_written = len(skipped)
        self._move()


def start_feeder(*args: Any, **kwargs: Any) -> Any:
    """A started feeder actor; the arguments are `Feeder`'s. It takes no CPU of Ray's count, and many calls at once."""
    return ray.remote(Feeder).options(num_cpus=0, max_restarts=0, max_concurrency=1000).remote(*args, **kwargs)
