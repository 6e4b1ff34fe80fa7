"""Ray Train workers on the real feeder and store; the hidden states come from the tiny target in transformers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from draftline.samples.plan import plan_rows
from draftline.training.run import training_actor
from draftline.training.spec import TrainingResult, TrainingSpec
from tiny import TAP_LAYERS, UNUSED_TOKEN

HIDDEN, PROMPT, TOKENS, SAMPLES, HELD_OUT = 64, 8, 24, 20, 4
BROKEN = 5  # the first capture of this sample fails on its way into the store


class TransformersReplica:
    """The target in transformers, writing its hidden states into Mooncake as vLLM's connector does."""

    def __init__(self, target: str, store: StoreConfig) -> None:
        import torch
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

        from states import TinyTarget

        torch.set_num_threads(1)
        self._target = TinyTarget(Path(target))
        self._store = MooncakeHiddenStatesStore(MooncakeStoreConfig.from_dict(store.connector_config())).setup()
        self._broke = False

    def answers(self, count: int) -> list[list[int]]:
        """Token ids of `count` prompts with their greedy answers."""
        import torch

        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(8, 264, (count, PROMPT), generator=generator).tolist()
        return [self._target.greedy(prompt, TOKENS) for prompt in prompts]

    def capture(self, key: str, token_ids: list[int]) -> dict[str, Any]:
        from hs_connectors.mooncake_store import packed_layout

        states = self._target.states(token_ids, PROMPT, TAP_LAYERS)
        tensors = {"hidden_states": states.hidden_states, "token_ids": states.token_ids}
        layout, size = packed_layout({name: (list(t.shape), t.dtype) for name, t in tensors.items()})
        manifest = {"handle": key, "version": 1, "tensors": layout, "metadata": {"total_aligned_bytes": size}}
        if f"-{BROKEN}-" in key and not self._broke:
            self._broke = True
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

    def feeder(self, ranks: int, row_tokens: int = 100) -> tuple[Any, int, int]:
        """A fresh feeder, its plan's steps and held-out positions."""
        lengths = {number: len(ids) for number, ids in self.token_ids.items()}
        plan = plan_rows(
            lengths, range(SAMPLES - HELD_OUT, SAMPLES), row_tokens=row_tokens, ranks=ranks, epochs=2, seed=0
        )
        shape = StatesShape(len(TAP_LAYERS) + 1, HIDDEN, 4)
        states = HiddenStates(window_bytes=6 * shape.sample_bytes(PROMPT + TOKENS), segment_bytes=64 << 20)
        prefix = f"run{time.monotonic_ns()}"
        feeder = start_feeder(plan, self.token_ids, [self.replica], self.store, states, shape, prefix)
        return feeder, plan.steps, plan.held_out_positions


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
    feeder, steps, held_out_positions = source.feeder(ranks)
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
        steps=steps,
        held_out_positions=held_out_positions,
        prompt_tokens=dict.fromkeys(source.token_ids, PROMPT),
        checkpoints=str(folder / "checkpoints"),
        provenance=Provenance("tiny", "a" * 64, "b" * 64),
        feeder=feeder,
        store=source.store,
    )


def train(
    spec: TrainingSpec, folder: Path, *, lost: int = 0, max_failures: int = 0, kill_after: Path | None = None
) -> TrainingResult:
    driver = training_actor()
    result = driver.run.remote(spec, folder / "ray", max_failures)
    while kill_after is not None and not kill_after.exists():
        assert not ray.wait([result], timeout=0.02)[0], "training ended before a worker could be killed"
    if kill_after is not None:
        kill_train_worker()
    trained: TrainingResult = ray.get(result)
    ray.kill(driver)
    stats = ray.get(spec.feeder.stats.remote())
    assert (stats["skipped_samples"], stats["lost_samples"]) == (0, lost)
    ray.get(spec.feeder.stop.remote())
    ray.kill(spec.feeder)
    return trained


def kill_train_worker() -> None:
    processes = {child.pid: child.name() for child in psutil.Process().children(recursive=True) if child.is_running()}
    workers = [pid for pid, name in processes.items() if name.startswith("ray::RayTrain")]
    assert len(workers) == 1, processes
    os.kill(workers[0], signal.SIGKILL)


def test_a_killed_worker_comes_back_and_ends_in_the_same_weights(source: Source, tmp_path: Path) -> None:
    whole = make_spec(source, tmp_path / "whole", ranks=1)
    result = train(whole, tmp_path / "whole", lost=1)  # the first run of all meets the broken capture
    assert result.resumed_from == 0
    assert result.figures["steps"] == whole.steps
    assert result.figures["tokens"] == 2 * (SAMPLES - HELD_OUT) * (PROMPT + TOKENS)
    assert result.figures["loss_held_out"] < result.figures["loss_start"]
    assert 0.0 <= result.figures["data_wait_share"] < 1.0

    killed = make_spec(source, tmp_path / "killed", ranks=1)
    first_checkpoint = tmp_path / "killed" / "checkpoints" / "step-00000002"
    again = train(killed, tmp_path / "killed", max_failures=1, kill_after=first_checkpoint)
    assert again.resumed_from >= 2
    last = f"checkpoints/step-{whole.steps:08d}/weights.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "killed" / last).read_bytes()
    assert again.history["evaluations"] == result.history["evaluations"]


def test_two_workers_share_the_rows(source: Source, tmp_path: Path) -> None:
    spec = make_spec(source, tmp_path, ranks=2)
    result = train(spec, tmp_path)
    assert result.figures["steps"] == spec.steps
    assert result.figures["loss_held_out"] < result.figures["loss_start"]
