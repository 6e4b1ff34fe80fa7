"""train: capture check, then extraction and training overlapped inside the byte window."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from draftline.errors import one_line
from draftline.runs.actors import remote_task
from draftline.runs.context import RunContext
from draftline.runs.frame import Stage
from draftline.runs.material import batch_plan
from draftline.runs.policy import Cause, guarantee
from draftline.runs.stages.training_attempt import TrainingAttempt
from draftline.runs.stopping import stop_behind
from draftline.samples.rows import Sample, read_samples
from draftline.targets.capture_check import CheckedSample, run_capture_check
from draftline.training.failures import cause_of, origin
from draftline.training.records import write_history
from draftline.training.spec import TrainingResult

CHECKED_SAMPLES = 4
# What a training can lose and a new attempt at it has again.
LOST = {"workers": Cause.WORKERS, "feeder": Cause.FEEDER, "master": Cause.MASTER, "store": Cause.STORAGE}


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
    write_history(history, result.history)
    stage.made(history)
    stage.made_in_store("checkpoints")
    context.frame.figures({f"train.{name}": value for name, value in result.figures.items()})
    if result.resumed_from:
        context.frame.figures({"train.resumed_from_step": result.resumed_from})
    skipped = int(context.frame.record.figures.get("train.skipped_samples", 0))
    context.frame.guarantee(guarantee(context.recipe.extraction.deterministic, skipped))


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
    """Attempts at the training until one ends: each goes on from the newest checkpoint."""
    recipe, progress = context.recipe, context.frame.progress
    plan = batch_plan(context, samples)
    progress.say(
        f"{plan.steps} steps of {recipe.training.workers} row(s) of up to {recipe.training.row_tokens} tokens, "
        f"{recipe.training.epochs} epoch(s)"
    )
    for number in itertools.count():
        try:
            return TrainingAttempt(context, samples, plan, number).run()
        except Exception as error:
            cause = None if stop_behind(error) else LOST.get(cause_of(error))
            if cause is None:
                raise
            context.frame.recover(cause, one_line(origin(error)))
    raise AssertionError("unreachable")
