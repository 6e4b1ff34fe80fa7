"""The feeder for real: Ray, a Mooncake master, actors that write states as replicas do, and workers that read them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from draftline.hidden_states.arrivals import ARRIVAL_S, SETTLE_S
from draftline.hidden_states.capacity import StatesShape
from draftline.hidden_states.feeder import LATE_S, ExtractionFailed, start_feeder
from draftline.hidden_states.master import MooncakeMaster
from draftline.hidden_states.skip_list import SkipList
from draftline.hidden_states.store import (
    StatesLost,
    StatesReader,
    StoreClient,
    StoreConfig,
    StoreUnavailable,
    quiet_environment,
)
from draftline.hidden_states.watch import WATCH_S
from draftline.recipe.schema import HiddenStates
from draftline.samples.plan import BatchPlan, plan_rows
from draftline.storage.local import LocalStore
from states_writer import HIDDEN_SIZE, LAYERS, StatesReplica

SHAPE = StatesShape(LAYERS, HIDDEN_SIZE, 4)
ROW_TOKENS = 128
TOKEN_IDS = {number: [number] * (16 + number * 37 % 96) for number in range(60)}
HELD_OUT = (0, 1, 2)
SEGMENT_BYTES = 64 << 20


class Rig:
    """A store and what is started around it; ends everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = MooncakeMaster.remote(str(folder))  # type: ignore[attr-defined]
        self.store = StoreConfig(ray.get(self.master.start.remote()), SEGMENT_BYTES, 16 << 20)
        self.replicas: list[Any] = []
        self.feeder: Any = None
        self._runs = 0

    def start(self, plan: BatchPlan, *, replicas: int = 2, delay_s: float = 0.002, **options: Any) -> Any:
        """A feeder with so many replicas; those that live from earlier tests serve again."""
        self.end_run()
        refused, forgotten = options.pop("refused", ()), options.pop("forgotten", ())
        living, self.replicas = self.replicas, []
        for replica in living:
            with contextlib.suppress(ray.exceptions.RayActorError):  # killed by a test
                ray.get(replica.configure.remote(delay_s, refused, forgotten))
                self.replicas.append(replica)
        while len(self.replicas) > replicas:
            self.end_replica(self.replicas.pop())
        while len(self.replicas) < replicas:
            self.add_replica(delay_s, refused, forgotten)
        return self.start_feeder(plan, **options)

    def add_replica(self, delay_s: float, refused: tuple[int, ...] = (), forgotten: tuple[int, ...] = ()) -> Any:
        """One more replica, which no feeder knows yet."""
        actor = ray.remote(StatesReplica).options(num_cpus=0, max_concurrency=100)
        self.replicas.append(actor.remote(self.store.connector_config(), delay_s, refused, forgotten))
        return self.replicas[-1]

    def start_feeder(self, plan: BatchPlan, **options: Any) -> Any:
        """A feeder with the replicas that there are."""
        states = {"window_bytes": 1 << 20, "concurrency": 4, "segment_bytes": SEGMENT_BYTES, "max_skipped_share": 0.1}
        states |= options.pop("states", {})
        self._runs += 1
        self.feeder = start_feeder(
            plan, TOKEN_IDS, self.replicas, self.store, HiddenStates(**states), SHAPE, f"run-{self._runs}", **options
        )
        return self.feeder

    def kill_replica(self, number: int) -> None:
        psutil.Process(ray.get(self.replicas[number].process_id.remote())).kill()

    def replace_master(self, same_ports: bool) -> None:
        """Another master; its actor was killed, and so its process."""
        ports = ray.get(self.master.ports.remote()) if same_ports else None
        process = psutil.Process(ray.get(self.master.process_id.remote()))
        ray.kill(self.master)
        while not has_ended(process):  # it ends with its actor's
            time.sleep(0.02)
        self.master = MooncakeMaster.remote(str(self.folder))  # type: ignore[attr-defined]
        self.store = replace(self.store, master_address=ray.get(self.master.start.remote(ports)))

    def end_run(self) -> None:
        if self.feeder is not None:
            ray.get(self.feeder.stop.remote())
            ray.kill(self.feeder)
            self.feeder = None

    def end_replica(self, replica: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayActorError):  # killed by a test
            ray.get(replica.stop.remote())
        ray.kill(replica)

    def end(self) -> None:
        self.end_run()
        for replica in self.replicas:
            self.end_replica(replica)
        ray.get(self.master.stop.remote())
        ray.kill(self.master)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    environment = quiet_environment() | {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    os.environ.update(quiet_environment())
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="ERROR")
    rig = Rig(tmp_path_factory.mktemp("master"))
    try:
        yield rig
        rig.end()
    finally:
        ray.shutdown()


def has_ended(process: psutil.Process) -> bool:
    """Whoever adopted it may never take note of its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def plan_for(ranks: int = 1, epochs: int = 1) -> BatchPlan:
    lengths = {number: len(ids) for number, ids in TOKEN_IDS.items()}
    return plan_rows(lengths, HELD_OUT, row_tokens=ROW_TOKENS, ranks=ranks, epochs=epochs, seed=0)


Change = Callable[[bytes], bytes | None]


def flipped(payload: bytes) -> bytes:
    return payload[:5] + bytes([payload[5] ^ 1]) + payload[6:]


def cut_short(payload: bytes) -> bytes:
    return payload[:-64]


def evicted(_: bytes) -> None:
    return None


class Worker:
    """A train worker's reading side; checks every tensor."""

    def __init__(self, rig: Rig, plan: BatchPlan, rank: int = 0) -> None:
        self._feeder, self._plan, self._rank = rig.feeder, plan, rank
        self._reader = StatesReader(rig.store)
        self._rig = rig
        self.damage: set[int] = set()  # samples whose states are to be damaged before they are read
        self.change: Change = flipped  # how
        self.read_timeout_s = 5.0
        self.had: list[tuple[int, ...]] = []

    def train(self, group: str = "first", first: int = 0, last: int | None = None) -> list[tuple[int, ...]]:
        """Takes the held-out rows and the training steps first..last; returns the samples of each row."""
        held_out = self._plan.held_out_positions
        end = self._plan.positions if last is None else held_out + last
        ray.get(self._feeder.restart.remote(self._rank, held_out + first, group))
        for position in (*range(held_out), *range(held_out + first, end)):
            samples = self._take(position)
            if samples is None:
                break
            self.had.append(samples)
            ray.get(self._feeder.commit.remote(self._rank, position))
        return self.had

    def _take(self, position: int) -> tuple[int, ...] | None:
        while True:
            row = ray.get(self._feeder.next_row.remote(self._rank, position))
            if row is None:
                return None
            if all([self._reads(delivery) for delivery in row]):
                return tuple(delivery.sample for delivery in row)

    def _reads(self, delivery: Any) -> bool:
        token_ids = TOKEN_IDS[delivery.sample]
        if delivery.sample in self.damage:
            self.damage.discard(delivery.sample)
            damage(self._rig.store, str(delivery.manifest["handle"]), self.change)
        try:
            self._reader.rejoin(delivery.store)
            states = self._reader.read(delivery.manifest, self.read_timeout_s, token_ids)
        except (StatesLost, StoreUnavailable) as error:
            ray.get(self._feeder.lost.remote(delivery.key, str(error)))
            return False
        hidden = states["hidden_states"]
        assert hidden.shape == (len(token_ids), LAYERS, HIDDEN_SIZE)
        assert hidden[0, 0, 0] == delivery.sample and hidden[-1, -1, -1] == delivery.sample + hidden.numel() - 1
        return True

    def close(self) -> None:
        self._reader.close()


def damage(store: StoreConfig, handle: str, change: Change) -> None:
    """Puts something else in the place of stored states, or nothing."""
    client = StoreClient(store)
    payload = change(client._client.get(handle))
    assert client._client.remove(handle, True) == 0
    assert payload is None or client._client.put(handle, payload) == 0
    client.close()


def wait_for_captures(feeder: Any, count: int) -> None:
    while ray.get(feeder.stats.remote())["captured_samples"] < count:
        time.sleep(0.02)


def train(rig: Rig, plan: BatchPlan, **options: Any) -> list[list[tuple[int, ...]]]:
    """All ranks at once; returns the rows of each."""
    workers = [Worker(rig, plan, rank) for rank in range(plan.ranks)]
    with ThreadPoolExecutor(plan.ranks) as threads:
        rows = [future.result() for future in [threads.submit(worker.train, **options) for worker in workers]]
    for worker in workers:
        worker.close()
    return rows


def planned(plan: BatchPlan, first: int = 0) -> list[list[tuple[int, ...]]]:
    positions = [*range(plan.held_out_positions), *range(plan.held_out_positions + first, plan.positions)]
    return [[plan.row(position, rank).samples for position in positions] for rank in range(plan.ranks)]


def test_two_ranks_get_their_rows_and_the_store_ends_empty(rig: Rig) -> None:
    plan = plan_for(ranks=2, epochs=2)
    feeder = rig.start(plan, begin_at=plan.held_out_positions)
    assert train(rig, plan) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["window_peak_bytes"] <= stats["window_budget_bytes"] == 1 << 20
    assert len(TOKEN_IDS) <= stats["captured_samples"] <= 2 * len(TOKEN_IDS) - len(HELD_OUT)
    assert stats["lost_samples"] == stats["failed_captures"] == stats["skipped_samples"] == 0
    rig.end_run()  # waits for the deletions
    client = StoreClient(rig.store)
    keys = [f"run-1-{attempt}-{number}-{epoch}" for attempt in range(3) for number in TOKEN_IDS for epoch in (-1, 0, 1)]
    assert client.missing(keys) == keys
    client.close()


def test_a_window_that_holds_an_epoch_captures_each_sample_once(rig: Rig) -> None:
    plan = plan_for(epochs=4)
    feeder = rig.start(plan, states={"window_bytes": 8 << 20})
    began = time.perf_counter()
    assert train(rig, plan) == planned(plan)
    took_s = time.perf_counter() - began
    assert ray.get(feeder.stats.remote())["captured_samples"] == len(TOKEN_IDS)
    samples = sum(len(row.samples) for row in plan.rows)
    print(f"{samples} samples in {took_s:.2f} s, {1000 * took_s / samples:.2f} ms a sample, reading included")


def test_commits_that_overtake_each_other_wait_for_their_turn(rig: Rig) -> None:
    plan = plan_for()
    feeder = rig.start(plan)
    ray.get(feeder.restart.remote(0, plan.held_out_positions, "first"))
    first, second = 0, 1
    for position in (first, second):
        ray.get(feeder.next_row.remote(0, position))
    late = feeder.commit.remote(0, second)
    assert not ray.wait([late], timeout=0.3)[0]
    ray.get([feeder.commit.remote(0, first), late])


def test_a_killed_replica_is_done_without(rig: Rig) -> None:
    plan = plan_for(epochs=2)
    feeder = rig.start(plan, delay_s=0.02)
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(train, rig, plan)
        wait_for_captures(feeder, 20)
        rig.kill_replica(1)
        assert rows.result(timeout=120) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["replicas_lost"] == 1 and stats["replicas"] == 1 and stats["skipped_samples"] == 0
    assert [cause for cause, _ in stats["incidents"]].count("replica") == 1
    assert stats["incidents_total"] == len(stats["incidents"])


def test_a_replica_that_comes_brings_its_room_with_it(rig: Rig) -> None:
    plan = plan_for(epochs=2)
    feeder = rig.start(plan, delay_s=0.05, states={"window_bytes": 100 << 20})
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(train, rig, plan)
        wait_for_captures(feeder, 10)
        rig.kill_replica(0)
        while (stats := ray.get(feeder.stats.remote()))["replicas"] == 2:
            time.sleep(0.02)
        assert stats["window_budget_bytes"] < 52 << 20
        assert ray.get(feeder.add_replica.remote(rig.add_replica(0.05))) == "replica 2"
        stats = ray.get(feeder.stats.remote())
        assert stats["window_budget_bytes"] == 100 << 20 and stats["replicas"] == 2
        assert rows.result(timeout=120) == planned(plan)


def test_the_last_replica_can_be_replaced(rig: Rig) -> None:
    plan = plan_for()
    feeder = rig.start(plan, replicas=1, delay_s=0.05)
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(train, rig, plan)
        wait_for_captures(feeder, 20)
        rig.kill_replica(0)
        while ray.get(feeder.stats.remote())["replicas"]:
            time.sleep(0.02)
        ray.get(feeder.add_replica.remote(rig.add_replica(0.002)))
        assert rows.result(timeout=120) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["replicas_lost"] == 1 and stats["replicas"] == 1 and stats["skipped_samples"] == 0


def test_a_sample_that_cannot_be_captured_is_left_out_also_next_time(rig: Rig, tmp_path: Path) -> None:
    plan = plan_for()
    skip_list = SkipList(LocalStore(tmp_path), "skipped.json")
    feeder = rig.start(plan, refused=(7,), skip_list=skip_list)
    without = [[tuple(sample for sample in row if sample != 7) for row in rows] for rows in planned(plan)]
    assert train(rig, plan) == without
    stats = ray.get(feeder.stats.remote())
    assert stats["failed_captures"] == 3 and stats["skipped_samples"] == 1
    assert "token 7 is refused" in str(skip_list.read())
    rig.start(plan, skip_list=skip_list)
    assert train(rig, plan) == without


def test_too_many_skipped_samples_end_the_run(rig: Rig) -> None:
    plan = plan_for()
    rig.start(plan, refused=tuple(range(20, 40)))
    with pytest.raises(ExtractionFailed, match=r"more than hidden_states.max_skipped_share .*token \d+ is refused"):
        train(rig, plan)


def test_workers_that_start_again_get_the_held_out_rows_and_the_rest(rig: Rig) -> None:
    plan = plan_for(ranks=2)
    rig.start(plan)
    train(rig, plan, last=6)
    assert train(rig, plan, group="second", first=4) == planned(plan, first=4)


def test_a_master_that_dies_is_started_again(rig: Rig) -> None:
    plan = plan_for()
    feeder = rig.start(plan, delay_s=0.05, master=rig.master)
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(train, rig, plan)
        wait_for_captures(feeder, 20)
        psutil.Process(ray.get(rig.master.process_id.remote())).kill()
        assert rows.result(timeout=120) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["store_restarts"] == 1 and stats["skipped_samples"] == 0


@pytest.mark.parametrize("same_ports", [True, False])
def test_another_master_takes_over(rig: Rig, same_ports: bool) -> None:
    plan = plan_for()
    feeder = rig.start(plan, delay_s=0.05, master=rig.master)
    before = rig.store.master_address
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(train, rig, plan)
        wait_for_captures(feeder, 20)
        rig.replace_master(same_ports)
        assert (rig.store.master_address == before) == same_ports
        ray.get(feeder.attach_master.remote(rig.master))
        assert rows.result(timeout=120) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["store_restarts"] == 1 and stats["skipped_samples"] == 0 and stats["replicas"] == 2
    assert [cause for cause, _ in stats["incidents"]].count("master") == 1


def test_a_master_s_loss_is_no_try_at_any_sample(rig: Rig) -> None:
    """What readers were given before, and find gone long after, is not charged: one try is all that there is."""
    plan = plan_for()
    feeder = rig.start(plan, delay_s=0.02, master=rig.master, states={"attempts": 1})
    worker = Worker(rig, plan)
    ray.get(feeder.restart.remote(0, plan.held_out_positions, "first"))
    row = [delivery for position in (0, 1) for delivery in ray.get(feeder.next_row.remote(0, position))]
    assert len(row) > 1
    psutil.Process(ray.get(rig.master.process_id.remote())).kill()
    ray.get(feeder.lost.remote(row[0].key, "as a reader says that is the first to notice"))
    time.sleep(SETTLE_S + WATCH_S + 1.0)
    ray.get([feeder.lost.remote(delivery.key, "as a patient reader says") for delivery in row[1:]])
    assert [worker.train("second")] == planned(plan)
    worker.close()
    stats = ray.get(feeder.stats.remote())
    assert stats["skipped_samples"] == 0 and stats["lost_samples"] >= len(row)


@pytest.mark.parametrize(
    ("change", "found"),
    [(flipped, "their checksum is"), (cut_short, "payload size"), (evicted, "not found within")],
    ids=["flipped", "cut short", "evicted"],
)
def test_damaged_states_are_captured_again(rig: Rig, change: Change, found: str) -> None:
    plan = plan_for()
    feeder = rig.start(plan)
    worker = Worker(rig, plan)
    worker.damage = {plan.row(plan.held_out_positions, 0).samples[0], 0}
    worker.change, worker.read_timeout_s = change, 1.0
    assert [worker.train()] == planned(plan)
    worker.close()
    stats = ray.get(feeder.stats.remote())
    assert stats["lost_samples"] == 2 and stats["captured_samples"] == len(TOKEN_IDS) + 2
    assert stats["skipped_samples"] == 0
    assert [cause for cause, text in stats["incidents"] if found in text] == ["state", "state"]


def test_states_that_were_never_written_are_captured_again(rig: Rig) -> None:
    plan = plan_for()
    forgotten = (0, plan.row(plan.held_out_positions + 1, 0).samples[0])
    feeder = rig.start(plan, replicas=1, forgotten=forgotten)
    began = time.monotonic()
    assert train(rig, plan) == planned(plan)
    assert time.monotonic() - began >= ARRIVAL_S
    stats = ray.get(feeder.stats.remote())
    assert stats["lost_samples"] == 2 and stats["captured_samples"] == len(TOKEN_IDS) + 2
    assert stats["skipped_samples"] == 0
    assert [cause for cause, text in stats["incidents"] if "not in the store" in text] == ["state", "state"]


def test_training_ends_early_for_all_ranks_alike(rig: Rig) -> None:
    plan = plan_for(ranks=2, epochs=4)
    feeder = rig.start(plan, delay_s=0.05)
    with ThreadPoolExecutor(2) as threads:
        workers = [Worker(rig, plan, rank) for rank in range(2)]
        rows = [threads.submit(worker.train) for worker in workers]
        wait_for_captures(feeder, 40)
        end = ray.get(feeder.finish_early.remote())
        had = [row.result(timeout=60) for row in rows]
    assert plan.held_out_positions < end < plan.positions
    assert had == [rows[:end] for rows in planned(plan)]
    assert ray.get(feeder.finish_early.remote()) == end
    for first in (0, end + 1 - plan.held_out_positions):
        rows = train(rig, plan, group=f"again {first}", first=first)
        assert rows == [rows[: max(plan.held_out_positions, end - first)] for rows in planned(plan, first)]
    time.sleep(0.5)
    stats = ray.get(feeder.stats.remote())
    assert stats["window_leased_bytes"] == 0 and stats["worker_starts"] == 3


def test_a_feeder_that_was_killed_leaves_nothing_behind(rig: Rig) -> None:
    plan = plan_for()
    feeder = rig.start(plan, delay_s=0.5)
    ray.get(feeder.restart.remote(0, plan.held_out_positions, "first"))
    wait_for_captures(feeder, 16)
    ray.get(feeder.next_row.remote(0, 0))  # leased by a reader
    ray.kill(feeder)
    feeder = rig.start_feeder(plan, predecessors=[f"run-{rig._runs}"])
    began = time.monotonic()
    assert train(rig, plan) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["window_peak_bytes"] <= stats["window_budget_bytes"] and stats["lost_samples"] == 0
    time.sleep(max(0.0, LATE_S[0] + 1.0 - (time.monotonic() - began)))
    ray.get(feeder.stop.remote())
    rig.feeder = None
    client = StoreClient(rig.store)
    assert client.clear() == 0
    client.close()
