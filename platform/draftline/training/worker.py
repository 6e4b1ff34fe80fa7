"""One Ray Train worker: builds the draft and trains it on the feeder's rows, from the newest checkpoint to the last."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

REPORT_EVERY_S = 1.0


def train_worker(config: dict[str, Any]) -> dict[str, Any] | None:
    """The `train_loop_per_worker`; `config["spec"]` is a `TrainingSpec`. The draft is what the last checkpoint holds.

    Rank 0 returns the fields of a `TrainingResult`, the others None.
    """
    import ray.train.torch
    import torch

    from draftline.hidden_states.store import StatesReader
    from draftline.training.announce import Announcer
    from draftline.training.checkpoint import CheckpointFolder
    from draftline.training.feeding import FeederRows
    from draftline.training.loop import LoopSettings, Trainer
    from draftline.training.model import build_draft
    from draftline.training.reproducible import make_reproducible

    spec = config["spec"]
    recipe, training = spec.recipe, spec.recipe.training
    accelerator = recipe.resources.accelerator
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    if accelerator == "cpu":
        make_reproducible(training.threads)
    began = time.perf_counter()
    model = build_draft(
        recipe.draft, Path(spec.target), spec.kept_tokens, spec.mask_token_id, accelerator=accelerator, seed=recipe.seed
    )
    device = str(ray.train.torch.get_device())
    if accelerator == "gpu":
        torch.cuda.set_device(device)  # collectives of Python objects go through the current one
    settings = LoopSettings(spec.steps, recipe.seed, accelerator, device, rank, ranks)
    identity = spec.provenance.identity(recipe.seed)
    checkpoints = CheckpointFolder(Path(spec.checkpoints), identity, spec.workspace)
    announcer = Announcer(_where(spec), rank, ranks)
    trainer = Trainer(
        model,
        training,
        settings,
        checkpoints,
        _reporter(spec.board, rank),
        lambda step, history: announcer.checkpoint(step, _metrics(step, history)),
    )
    damaged = list(checkpoints.damaged)
    rows = FeederRows(
        spec.feeder,
        lambda address: StatesReader(replace(spec.store, master_address=address)),
        spec.prompt_tokens,
        group=_worker_group(),
        rank=rank,
        first_step=trainer.start_step,
        steps=spec.steps,
        held_out_positions=spec.held_out_positions,
        prefetch=training.prefetch_rows,
        token_digests=spec.token_digests,
    )
    ready = time.perf_counter()
    try:
        history = trainer.run(rows, rows.held_out())
    finally:
        rows.close()
    done = spec.steps if trainer.stopped_at is None else trainer.stopped_at
    announcer.end(_metrics(done, history))
    if rank != 0:
        return None
    return {
        "figures": history.figures(),
        "history": history.as_dict(),
        "resumed_from": trainer.start_step,
        "seconds": {"set_up": ready - began, "training": time.perf_counter() - ready},
        "stopped_at": trainer.stopped_at,
        "damaged_checkpoints": damaged,
    }


def _metrics(step: int, history: Any) -> dict[str, float]:
    return {"steps": step, "eal_held_out": history.evaluations[-1].eal}


def _where(spec: Any) -> dict[str, str]:
    """Where the checkpoints are, for Ray Train's pointers to them."""
    where = {"folder": spec.checkpoints}
    if spec.workspace is not None:
        where |= {"store": spec.workspace.store.url, "name": spec.workspace.name(Path(spec.checkpoints))}
    return where


def _worker_group() -> str:
    """Names this start of the worker group: Ray Train gives each one a placement group of its own."""
    from ray.util import get_current_placement_group

    placement = get_current_placement_group()
    return "" if placement is None else placement.id.hex()


def _reporter(progress: Any, rank: int) -> Callable[[dict[str, Any]], None]:
    """Sends rank 0's figures to the driver about once a second, and always those of the last step."""
    if progress is None or rank != 0:
        return lambda _: None
    last = float("-inf")

    def report(update: dict[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if update["step"] < update["steps"] and now - last < REPORT_EVERY_S:
            return
        last = now
        progress.update.remote(update)

    return report
