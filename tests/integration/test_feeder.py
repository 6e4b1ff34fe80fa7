"""The feeder for real: Ray, a Mooncake master, actors that write states as replicas do, and workers that read them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from draftline.hidden_states.capacity import StatesShape
from draftline.hidden_states.feeder import ExtractionFailed, start_feeder
from draftline.hidden_states.master import MooncakeMaster
from draftline.hidden_states.store import StatesLost, StatesReader, StoreClient, StoreConfig, quiet_environment
from draftline.recipe.schema import HiddenStates
from draftline.samples.plan import BatchPlan, plan_rows
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
        """A feeder with new replicas."""
        self.end_run()
        actor = ray.remote(StatesReplica).options(num_cpus=0, max_concurrency=100)
        refused = options.pop("refused", ())
        self.replicas = [actor.remote(self.store.connector_config(), delay_s, refused) for _ in range(replicas)]
        states = {"window_bytes": 1 << 20, "concurrency": 4, "segment_bytes": SEGMENT_BYTES, "max_skipped_share": 0.1}
        states |= options.pop("states", {})
        self._runs += 1
        self.feeder = start_feeder(
            plan, TOKEN_IDS, self.replicas, self.store, HiddenStates(**states), SHAPE, f"run-{self._runs}", **options
        )
        return self.feeder

    def end_run(self) -> None:
        if self.feeder is not None:
            ray.get(self.feeder.stop.remote())
        for replica in self.replicas:
            with contextlib.suppress(ray.exceptions.RayActorError):  # killed by the test
                ray.get(replica.stop.remote())
        for actor in (self.feeder, *self.replicas):
            if actor is not None:
                ray.kill(actor)
        self.feeder, self.replicas = None, []

    def end(self) -> None:
        self.end_run()
        ray.get(self.master.stop.remote())
        ray.kill(self.master)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    environment = quiet_environment() | {"PYTHONPATH": str(Path(__file__).parent.parent), "RAY_AUTH_MODE": "disabled"}
    os.environ.update(quiet_environment())
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="ERROR")
    rig = Rig(tmp_path_factory.mktemp("master"))
    yield rig
    rig.end()
    ray.shutdown()


def plan_for(ranks: int = 1, epochs: int = 1) -> BatchPlan:
    lengths = {number: len(ids) for number, ids in TOKEN_IDS.items()}
    return plan_rows(lengths, HELD_OUT, row_tokens=ROW_TOKENS, ranks=ranks, epochs=epochs, seed=0)


class Worker:
    """A train worker's reading side; checks every tensor."""

    def __init__(self, rig: Rig, plan: BatchPlan, rank: int = 0) -> None:
        self._feeder, self._plan, self._rank = rig.feeder, plan, rank
        self._reader = StatesReader(rig.store)
        self.had: list[tuple[int, ...]] = []

    def train(self, group: str = "first", first: int = 0, last: int | None = None) -> list[tuple[int, ...]]:
        """Takes the held-out rows and the training steps first..last; returns the samples of each row."""
        held_out = self._plan.held_out_positions
        end = self._plan.positions if last is None else held_out + last
        ray.get(self._feeder.restart.remote(self._rank, held_out + first, group))
        for position in (*range(held_out), *range(held_out + first, end)):
            self.had.append(self._take(position))
            ray.get(self._feeder.commit.remote(self._rank, position))
        return self.had

    def _take(self, position: int) -> tuple[int, ...]:
        while True:
            row = ray.get(self._feeder.next_row.remote(self._rank, position))
            if all([self._reads(delivery) for delivery in row]):
                return tuple(delivery.sample for delivery in row)

    def _reads(self, delivery: Any) -> bool:
        token_ids = TOKEN_IDS[delivery.sample]
        try:
            states = self._reader.read(delivery.manifest, 20.0, token_ids)
        except StatesLost as error:
            ray.get(self._feeder.lost.remote(delivery.key, error.reason))
            return False
        hidden = states["hidden_states"]
        assert hidden.shape == (len(token_ids), LAYERS, HIDDEN_SIZE)
        assert hidden[0, 0, 0] == delivery.sample and hidden[-1, -1, -1] == delivery.sample + hidden.numel() - 1
        return True

    def close(self) -> None:
        self._reader.close()


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
    victim = ray.get(rig.replicas[1].process_id.remote())
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(train, rig, plan)
        while ray.get(feeder.stats.remote())["captured_samples"] < 20:
            time.sleep(0.02)
        psutil.Process(victim).kill()
        assert rows.result(timeout=120) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["replicas_lost"] == 1 and stats["replicas"] == 1 and stats["skipped_samples"] == 0


def test_without_a_replica_everybody_is_told(rig: Rig) -> None:
    plan = plan_for(ranks=2)
    rig.start(plan, replicas=1, delay_s=0.05)
    victim = ray.get(rig.replicas[0].process_id.remote())
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(Worker(rig, plan, rank).train) for rank in range(2)]
        time.sleep(0.3)
        psutil.Process(victim).kill()
        for rank in ranks:
            with pytest.raises(ExtractionFailed, match="no target replica is left"):
                rank.result(timeout=60)


def test_a_sample_that_cannot_be_captured_is_left_out_also_next_time(rig: Rig, tmp_path: Path) -> None:
    plan = plan_for()
    skip_file = tmp_path / "skipped.json"
    feeder = rig.start(plan, refused=(7,), skip_file=str(skip_file))
    without = [[tuple(sample for sample in row if sample != 7) for row in rows] for rows in planned(plan)]
    assert train(rig, plan) == without
    stats = ray.get(feeder.stats.remote())
    assert stats["failed_captures"] == 3 and stats["skipped_samples"] == 1
    assert "token 7 is refused" in skip_file.read_text()
    rig.start(plan, skip_file=str(skip_file))
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
        while ray.get(feeder.stats.remote())["captured_samples"] < 20:
            time.sleep(0.02)
        psutil.Process(ray.get(rig.master.process_id.remote())).kill()
        assert rows.result(timeout=120) == planned(plan)
    stats = ray.get(feeder.stats.remote())
    assert stats["store_restarts"] == 1 and stats["skipped_samples"] == 0
