"""train: capture check, then extraction and training overlapped inside the byte window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftline.hidden_states.feeder import start_feeder
from draftline.recipe.sizes import states_shape
from draftline.runs.actors import remote_task
from draftline.runs.context import RunContext
from draftline.runs.frame import Stage
from draftline.runs.material import batch_plan, draft_vocabulary, provenance
from draftline.samples.rows import Sample, read_samples
from draftline.storage.files import write_json_atomic
from draftline.targets.capture_check import CheckedSample, run_capture_check
from draftline.training.run import training_actor
from draftline.training.spec import TrainingResult, TrainingSpec

CHECKED_SAMPLES = 4
POLL_S = 1.0


def train(context: RunContext, stage: Stage) -> None:
    """Leaves the final checkpoint and the training history in the run's folder."""
    samples = read_samples(context.samples_file)
    _capture_check(context, samples)
    context.actors.share_cores(alone=False)
    try:
        result = _train(context, samples)
    finally:
        context.actors.share_cores(alone=True)
    history = context.frame.folder.report / "training.json"
    write_json_atomic(history, dict(result.history))
    stage.made(history, context.frame.folder.checkpoints)
    context.frame.figures({f"train.{name}": value for name, value in result.figures.items()})
    if result.resumed_from:
        context.frame.figures({"train.resumed_from_step": result.resumed_from})


def _capture_check(context: RunContext, samples: Sequence[Sample]) -> None:
    """Proves on a few samples of every replica that what it captures is the target's."""
    import ray

    recipe, replicas = context.recipe, context.actors.replicas()
    chosen = sorted(samples, key=lambda sample: (-sample.answer_tokens, sample.number))[:CHECKED_SAMPLES]
    checked: list[CheckedSample] = []
    for place, replica in enumerate(replicas):
        keys = [context.key(f"check{place}", sample.number) for sample in chosen]
        manifests = ray.get([replica.capture.remote(k, s.token_ids) for k, s in zip(keys, chosen, strict=True)])
        checked += [
            CheckedSample(sample.number, sample.token_ids, sample.prompt_tokens, manifest)
            for sample, manifest in zip(chosen, manifests, strict=True)
        ]
    greedy = recipe.data.answer.temperature == 0
    task = remote_task(run_capture_check, recipe, threads=1)
    report = ray.get(
        task.remote(checked, tuple(recipe.draft.tap_layers), str(context.target.path), context.actors.store(), greedy)
    )
    context.frame.progress.say(
        f"capture check passed: {report.samples} samples, {report.positions} positions, {report.near_ties} near ties"
    )
    context.frame.figures({"train.capture_check_positions": report.positions})


def _train(context: RunContext, samples: Sequence[Sample]) -> TrainingResult:
    import ray

    recipe, folder, progress = context.recipe, context.frame.folder, context.frame.progress
    plan = batch_plan(context, samples)
    progress.say(
        f"{plan.steps} steps of {recipe.training.workers} row(s) of up to {recipe.training.row_tokens} tokens, "
        f"{recipe.training.epochs} epoch(s)"
    )
    feeder = context.actors.own(
        "feeder",
        start_feeder(
            plan=plan,
            token_ids={sample.number: sample.token_ids for sample in samples},
            replicas=context.actors.replicas(),
            store=context.actors.store(),
            states=recipe.hidden_states,
            shape=states_shape(recipe, context.target),
            key_prefix=context.key("states", 0),
            master=context.actors.master(),
            skip_file=str(folder.path / "skipped.json"),
            # Extraction need not wait for the workers to start, unless a checkpoint will say where they begin.
            begin_at=None if folder.checkpoints.exists() else plan.held_out_positions,
        ),
    )
    board = context.actors.own("progress board", _board())
    spec = TrainingSpec(
        recipe=recipe,
        target=str(context.target.path),
        kept_tokens=draft_vocabulary(context, samples),
        mask_token_id=context.mask_token_id,
        steps=plan.steps,
        held_out_positions=plan.held_out_positions,
        prompt_tokens={sample.number: sample.prompt_tokens for sample in samples},
        checkpoints=str(folder.checkpoints.resolve()),
        provenance=provenance(context),
        feeder=feeder,
        store=context.actors.store(),
        progress=board,
    )
    driver = context.actors.own("train workers", training_actor())
    result = driver.run.remote(spec, folder.path / "ray_train")
    while not ray.wait([result], timeout=POLL_S)[0]:
        update, stats = ray.get([board.latest.remote(), feeder.stats.remote()])
        _show(progress, update, stats)
    trained = ray.get(result)
    stats = ray.get(feeder.stats.remote())
    context.frame.figures({f"train.{name}": value for name, value in stats.items() if isinstance(value, int | float)})
    for name in ("train workers", "feeder", "progress board"):
        context.actors.end(name)
    return trained


class _ProgressBoard:
    """Where rank 0 leaves its latest figures for the driver to show."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] | None = None

    def update(self, figures: dict[str, Any]) -> None:
        self._latest = figures

    def latest(self) -> dict[str, Any] | None:
        return self._latest

    def stop(self) -> None: ...


def _board() -> Any:
    import ray

    return ray.remote(_ProgressBoard).options(num_cpus=0).remote()


def _show(progress: Any, update: dict[str, Any] | None, stats: dict[str, Any]) -> None:
    if update is None:
        progress.update({"unit": "captured sample", "done": stats["captured_samples"]})
        return
    shown: dict[str, float] = {key: update[key] for key in ("loss", "eal", "eal_held_out", "lr") if key in update}
    progress.update({"unit": "step", "done": update["step"], "total": update["steps"], **shown})
