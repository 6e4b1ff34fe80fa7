"""Ray Train workers on the real feeder and store; the hidden states come from the tiny target in transformers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from draftline.drafts.manifest import Provenance
from draftline.hidden_states.capacity import StatesShape
from draftline.hidden_states.feeder import start_feeder
from draftline.hidden_states.master import MooncakeMaster
from draftline.hidden_states.store import StoreConfig
from draftline.recipe.schema import Data, Draft, HiddenStates, Optimizer, Recipe, Resources, Target, Training
from draftline.runs.stages.training_attempt import progress_board
from draftline.samples.plan import BatchPlan, plan_rows
from draftline.storage.local import LocalStore
from draftline.storage.workspace import Workspace
from draftline.training.failures import TrainingFailed, cause_of
from draftline.training.run import training_actor
from draftline.training.spec import TrainingResult, TrainingSpec, token_digest
from draftline.training.trajectory import consumption_problems
from tiny import TAP_LAYERS, UNUSED_TOKEN

HIDDEN, PROMPT, TOKENS, SAMPLES, HELD_OUT = 64, 8, 24, 20, 4
EPOCHS = 3
BROKEN = 5  # the first capture of this sample fails on its way into the store
MIXED_UP = 7  # the first capture of this one holds another sample's tokens and states
CAPTURE_S = 0.03  # so long that a training lasts long enough to be disturbed


class TransformersReplica:
    """The target in transformers, writing its hidden states into Mooncake as vLLM's connector does."""

    def __init__(self, target: str, store: StoreConfig) -> None:
        import torch
        from hs_connectors.mooncake_store import MooncakeStoreConfig

        from draftline.hidden_states.writer import PatientStore
        from states import TinyTarget

        torch.set_num_threads(1)
        self._target = TinyTarget(Path(target))
        self._store = PatientStore(MooncakeStoreConfig.from_dict(store.connector_config())).setup()
        self._faults = {BROKEN, MIXED_UP}

    def answers(self, count: int) -> list[list[int]]:
        """Token ids of `count` prompts with their greedy answers."""
        import torch

        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(8, 264, (count, PROMPT), generator=generator).tolist()
        return [self._target.greedy(prompt, TOKENS) for prompt in prompts]

    def capture(self, key: str, token_ids: list[int]) -> dict[str, Any]:
        from hs_connectors.mooncake_store import packed_layout

        from draftline.hidden_states.checksum import add_checksum

        time.sleep(CAPTURE_S)
        fault = next((number for number in self._faults if f"-{number}-" in key), None)
        self._faults.discard(fault)  # type: ignore[arg-type]
        if fault == MIXED_UP:
            token_ids = token_ids[::-1]
        states = self._target.states(token_ids, PROMPT, TAP_LAYERS)
        tensors = {"hidden_states": states.hidden_states, "token_ids": states.token_ids}
        layout, size = packed_layout({name: (list(t.shape), t.dtype) for name, t in tensors.items()})
        manifest = {"handle": key, "version": 1, "tensors": layout, "metadata": {"total_aligned_bytes": size}}
        add_checksum(manifest)
        if fault == BROKEN:
            self._store.put_error(manifest, "broken on purpose")
        else:
            self._store.put_sample(manifest, tensors)
        return manifest

    def healthy(self) -> bool:
        return True


@dataclass(frozen=True)
class Source:
    """Everything that the runs share."""

    store: StoreConfig
    replica: Any
    token_ids: dict[int, list[int]]
    target: Path

    def plan(self, ranks: int) -> BatchPlan:
        lengths = {number: len(ids) for number, ids in self.token_ids.items()}
        return plan_rows(
            lengths, range(SAMPLES - HELD_OUT, SAMPLES), row_tokens=100, ranks=ranks, epochs=EPOCHS, seed=0
        )

    def feeder(self, ranks: int) -> Any:
        """A fresh feeder."""
        shape = StatesShape(len(TAP_LAYERS) + 1, HIDDEN, 4)
        states = HiddenStates(window_bytes=6 * shape.sample_bytes(PROMPT + TOKENS), segment_bytes=64 << 20)
        prefix = f"run{time.monotonic_ns()}"
        return start_feeder(self.plan(ranks), self.token_ids, [self.replica], self.store, states, shape, prefix)


@pytest.fixture(scope="module")
def source(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    here = Path(__file__).parent
    path = {"PYTHONPATH": f"{here}:{here.parent}"}  # so that actors find this module and its helpers
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": path})
    master = MooncakeMaster.remote(str(tmp_path_factory.mktemp("logs")))  # type: ignore[attr-defined]
    store = StoreConfig(ray.get(master.start.remote()), segment_bytes=64 << 20, buffer_bytes=16 << 20)
    replica = ray.remote(TransformersReplica).options(num_cpus=0).remote(str(tiny_target), store)
    answers = ray.get(replica.answers.remote(SAMPLES))
    yield Source(store, replica, dict(enumerate(answers)), tiny_target)
    ray.get(master.stop.remote())
    ray.shutdown()


def make_spec(source: Source, folder: Path, ranks: int) -> TrainingSpec:
    plan = source.plan(ranks)
    recipe = Recipe(
        run_id="tiny",
        target=Target(path=str(source.target)),
        data=Data(prompts="none.jsonl", answer={"max_tokens": TOKENS}),  # type: ignore[arg-type]
        draft=Draft(layers=1, tap_layers=list(TAP_LAYERS), block_size=4, markov_rank=8, vocab_size=128),
        training=Training(
            workers=ranks,
            row_tokens=100,
            max_anchors=48,
            evaluate_every_steps=3,
            checkpoint_every_steps=2,
            optimizer=Optimizer(lr=5e-3),
        ),
        resources=Resources(cpus_per_actor=0.5),
    )
    return TrainingSpec(
        recipe=recipe,
        target=str(source.target),
        kept_tokens=tuple(range(2, 130)),
        mask_token_id=UNUSED_TOKEN,
        steps=plan.steps,
        held_out_positions=plan.held_out_positions,
        prompt_tokens=dict.fromkeys(source.token_ids, PROMPT),
        checkpoints=str(folder / "checkpoints"),
        provenance=Provenance("tiny", "a" * 64, "b" * 64),
        feeder=source.feeder(ranks),
        store=source.store,
        token_digests={number: token_digest(ids) for number, ids in source.token_ids.items()},
    )


class Attempt:
    """One attempt at a training, with a feeder of its own."""

    def __init__(self, spec: TrainingSpec, folder: Path, number: int = 0, max_failures: int = 0) -> None:
        self.spec = spec
        self._driver = training_actor()
        self._result = self._driver.run.remote(spec, str(folder / "ray"), None, str(number), max_failures)

    def wait_for_checkpoint(self, after: int = 0) -> None:
        """Until there is one of a later step than `after`."""
        while newest(self.spec) <= after:
            assert not ray.wait([self._result], timeout=0.02)[0], "training ended before it could be disturbed"

    def result(self) -> TrainingResult:
        try:
            return ray.get(self._result)
        finally:
            ray.kill(self._driver)

    def end_feeder(self, lost: int = 0) -> None:
        stats = ray.get(self.spec.feeder.stats.remote())
        assert (stats["skipped_samples"], stats["lost_samples"]) == (0, lost)
        ray.get(self.spec.feeder.stop.remote())
        ray.kill(self.spec.feeder)


def newest(spec: TrainingSpec) -> int:
    return max((int(folder.name[5:]) for folder in Path(spec.checkpoints).glob("step-*")), default=0)


def weights(spec: TrainingSpec) -> bytes:
    return (Path(spec.checkpoints) / f"step-{spec.steps:08d}" / "weights.safetensors").read_bytes()


def kill_train_worker() -> None:
    processes = {child.pid: child.name() for child in psutil.Process().children(recursive=True) if child.is_running()}
    workers = [pid for pid, name in processes.items() if name.startswith("ray::RayTrain")]
    assert len(workers) == 1, processes
    os.kill(workers[0], signal.SIGKILL)


@dataclass(frozen=True)
class Whole:
    spec: TrainingSpec
    result: TrainingResult
    folder: Path


@pytest.fixture(scope="module")
def whole(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A training of one worker that nothing disturbs but two broken captures: the first run of all meets those."""
    folder = tmp_path_factory.mktemp("whole")
    attempt = Attempt(make_spec(source, folder, ranks=1), folder)
    result = attempt.result()
    attempt.end_feeder(lost=2)
    return Whole(attempt.spec, result, folder)


def assert_same(spec: TrainingSpec, result: TrainingResult, whole: Whole) -> None:
    assert weights(spec) == weights(whole.spec)
    for name in ("evaluations", "consumed"):
        assert result.history[name] == whole.result.history[name], name
    assert [step["loss"] for step in result.history["steps"]] == [s["loss"] for s in whole.result.history["steps"]]


def test_a_killed_worker_comes_back_and_ends_in_the_same_weights(source: Source, whole: Whole, tmp_path: Path) -> None:
    result, spec = whole.result, whole.spec
    assert (result.resumed_from, result.stopped_at, result.damaged_checkpoints) == (0, None, [])
    assert result.figures["steps"] == spec.steps
    assert result.figures["tokens"] == EPOCHS * (SAMPLES - HELD_OUT) * (PROMPT + TOKENS)
    assert result.figures["loss_held_out"] < result.figures["loss_start"]
    assert 0.0 <= result.figures["data_wait_share"] < 1.0
    assert consumption_problems(result.history["consumed"], source.plan(1)) == []
    # Ray Train knows the last checkpoint, and has no copy of it.
    pointers = sorted((whole.folder / "ray").glob("tiny-train-0/checkpoint_*/*"))
    assert {pointer.name for pointer in pointers} == {"checkpoint.json"}
    assert json.loads(pointers[-1].read_text()) == {"step": spec.steps, "folder": spec.checkpoints}

    # The killed one also publishes its checkpoints to a store elsewhere.
    workspace = Workspace(LocalStore(tmp_path / "store"), "tiny", tmp_path / "killed")
    board = progress_board()
    killed = replace(make_spec(source, tmp_path / "killed", ranks=1), workspace=workspace, board=board)
    attempt = Attempt(killed, tmp_path / "killed", max_failures=1)
    attempt.wait_for_checkpoint()
    kill_train_worker()
    again = attempt.result()
    attempt.end_feeder()
    assert again.resumed_from >= 2
    (loss,) = ray.get(board.losses.remote())
    assert loss.startswith("train worker 0: "), loss
    ray.kill(board)
    assert_same(killed, again, whole)
    published = tmp_path / "store" / "tiny" / "checkpoints" / f"step-{spec.steps:08d}"
    assert sorted(path.name for path in published.iterdir()) == [
        "history.json",
        "manifest.json",
        "optimizer.pt",
        "weights.safetensors",
    ]
    assert (published / "weights.safetensors").read_bytes() == weights(whole.spec)


def test_a_dead_feeder_ends_the_attempt_at_once_and_an_early_end_changes_nothing(
    source: Source, whole: Whole, tmp_path: Path
) -> None:
    spec = make_spec(source, tmp_path, ranks=1)
    attempt = Attempt(spec, tmp_path, number=0, max_failures=3)
    attempt.wait_for_checkpoint()
    ray.kill(spec.feeder)
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        attempt.result()
    assert cause_of(caught.value) == "feeder"
    assert "FeederGone: the feeder is gone" in str(caught.value)
    assert time.monotonic() - began < 20.0  # no worker group was started again

    reached = newest(spec)
    assert 0 < reached < spec.steps
    attempt = Attempt(replace(spec, feeder=source.feeder(1)), tmp_path, number=1)
    attempt.wait_for_checkpoint(after=reached)
    end = ray.get(attempt.spec.feeder.finish_early.remote()) - spec.held_out_positions
    early = attempt.result()
    attempt.end_feeder()
    assert early.resumed_from >= reached
    assert early.stopped_at == end < spec.steps
    assert newest(spec) == end
    assert early.history["consumed"] == whole.result.history["consumed"][:end]

    attempt = Attempt(replace(spec, feeder=source.feeder(1)), tmp_path, number=2)
    rest = attempt.result()
    attempt.end_feeder()
    assert (rest.resumed_from, rest.stopped_at) == (end, None)
    assert_same(spec, rest, whole)


def test_two_workers_share_the_rows(source: Source, tmp_path: Path) -> None:
    attempt = Attempt(make_spec(source, tmp_path, ranks=2), tmp_path)
    result = attempt.result()
    attempt.end_feeder()
    assert result.figures["steps"] == attempt.spec.steps
    assert result.figures["loss_held_out"] < result.figures["loss_start"]
    assert consumption_problems(result.history["consumed"], source.plan(2)) == []
