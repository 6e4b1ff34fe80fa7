"""prepare: the target answers the prompts; its token ids become the samples."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from draftline.errors import one_line
from draftline.runs.context import RunContext
from draftline.runs.failures import cause_of
from draftline.runs.frame import RunFrame, Stage
from draftline.runs.policy import Cause
from draftline.samples.answer import answer_prompts
from draftline.samples.parts import AnswerParts
from draftline.samples.rows import write_samples


def prepare(context: RunContext, stage: Stage) -> None:
    """Writes the samples file."""
    frame = context.frame
    parts = AnswerParts(frame.workspace, frame.folder.samples / "parts")
    known = parts.read()
    if known:
        frame.progress.say(f"{len(known)} answers of an earlier attempt are kept")
    replicas = context.actors.replicas()
    began = time.monotonic()

    def report(answered: int, tokens: int) -> None:
        rate = tokens / max(time.monotonic() - began, 1e-9)
        frame.progress.update({"unit": "sample", "done": answered, "total": len(context.prompts), "tokens/s": rate})

    samples = answer_prompts(
        replicas,
        context.prompts,
        context.prompt_token_ids,
        context.recipe.data.answer,
        context.recipe.seed,
        known=known,
        on_progress=report,
        on_loss=lambda error: _replaced(context, error),
        keep=parts.add,
    )
    seconds = time.monotonic() - began
    write_samples(context.samples_file, samples)
    stage.made(context.samples_file)
    published = frame.workspace.publish(context.samples_file)
    parts.clear()  # not before the store has the samples
    forget_trainings_on_others(frame, published)
    kept = {sample.number for sample in known}
    tokens = sum(sample.answer_tokens for sample in samples)
    fresh_tokens = sum(sample.answer_tokens for sample in samples if sample.number not in kept)
    frame.figures(
        {
            "prepare.samples": len(samples),
            "prepare.held_out_samples": sum(sample.held_out for sample in samples),
            "prepare.tokens": sum(len(sample.token_ids) for sample in samples),
            "prepare.answer_tokens": tokens,
            "prepare.tokens_per_s": fresh_tokens / seconds,
            "prepare.cut_off_share": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        }
    )


def forget_trainings_on_others(frame: RunFrame, samples: Mapping[str, str]) -> None:
    """Removes checkpoints and skip list of a training on samples that were damaged since: answers made again may
    differ. `samples` is the sha256 of those made now, by name."""
    workspace, before = frame.workspace, frame.record.stages["prepare"].outputs
    if not before or before == samples:
        return
    frame.progress.say("the answers differ from those before: training begins again")
    checkpoints = workspace.names(workspace.name(frame.folder.checkpoints))
    workspace.remove(*checkpoints, workspace.name(frame.folder.skip_list))
    if frame.folder.checkpoints.exists():  # and those that were never published
        shutil.rmtree(frame.folder.checkpoints)


def _replaced(context: RunContext, error: Exception) -> Sequence[Any]:
    """The replicas, once new ones stand for those that are lost; raises `error` when it is of another kind."""
    if cause_of(error) is not Cause.ENGINE:
        raise error
    context.frame.recover(Cause.REPLICA, one_line(error))
    context.actors.replace_dead_replicas(wait=True)
    return context.actors.replicas()
