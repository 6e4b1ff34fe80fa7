"""prepare: the target answers the prompts; its token ids become the samples."""

from __future__ import annotations

import time

from draftline.runs.context import RunContext
from draftline.runs.frame import Stage
from draftline.samples.answer import answer_prompts
from draftline.samples.rows import write_samples


def prepare(context: RunContext, stage: Stage) -> None:
    """Writes the samples file."""
    progress = context.frame.progress
    replicas = context.actors.replicas()
    began = time.monotonic()

    def report(answered: int, tokens: int) -> None:
        rate = tokens / max(time.monotonic() - began, 1e-9)
        progress.update({"unit": "sample", "done": answered, "total": len(context.prompts), "tokens/s": rate})

    samples = answer_prompts(
        replicas, context.prompts, context.prompt_token_ids, context.recipe.data.answer, context.recipe.seed, report
    )
    seconds = time.monotonic() - began
    write_samples(context.samples_file, samples)
    stage.made(context.samples_file)
    tokens = sum(sample.answer_tokens for sample in samples)
    context.frame.figures(
        {
            "prepare.samples": len(samples),
            "prepare.held_out_samples": sum(sample.held_out for sample in samples),
            "prepare.tokens": sum(len(sample.token_ids) for sample in samples),
            "prepare.answer_tokens": tokens,
            "prepare.tokens_per_s": tokens / seconds,
            "prepare.cut_off_share": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        }
    )
