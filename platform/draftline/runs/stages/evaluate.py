"""evaluate: vLLM with the draft against vLLM without it, on held-out prompts, and the served check."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from draftline.evaluation.answers import HeldOutPrompt, Measurement
from draftline.evaluation.engine import DRAFT_ENGINE_ARGS, PLAIN_ENGINE_ARGS, MeasuredEngine
from draftline.evaluation.figures import evaluation_figures
from draftline.evaluation.measure import measure
from draftline.evaluation.served_check import check_served
from draftline.runs.actors import remote_task
from draftline.runs.context import RunContext
from draftline.runs.frame import Stage
from draftline.samples.rows import read_samples
from draftline.storage.files import write_json_atomic
from draftline.targets.engine_args import draft_engine_args
from draftline.training.estimate import EstimatedSample, run_walk_estimate

PLAIN, DRAFTED = "engine without a draft", "engine with the draft"


def evaluate(context: RunContext, stage: Stage) -> None:
    """Leaves the report of all measurements in the run's folder."""
    prompts = held_out_prompts(context)
    estimate = _walk_estimate(context, prompts)
    context.actors.close()  # the two engines need the memory, and nothing is captured from here on
    measurements = _measure(context, prompts)
    figures = evaluation_figures(measurements, estimate)
    report = context.frame.folder.report / "evaluation.json"
    write_json_atomic(report, {"figures": figures, "measurements": [asdict(m) for m in measurements]})
    stage.made(report)
    context.frame.figures(figures)
    check_served(figures, measurements, context.recipe.evaluation.estimate_tolerance)


def draft_tokens(context: RunContext) -> int:
    """Tokens drafted a pass, in evaluation as in serving."""
    return context.recipe.serving.draft_tokens or context.recipe.draft.max_draft_tokens


def held_out_prompts(context: RunContext) -> list[HeldOutPrompt]:
    """The first held-out prompts of each domain, as many as the recipe says."""
    by_domain = defaultdict(list)
    for sample in read_samples(context.samples_file):
        if sample.held_out:
            by_domain[sample.domain].append(sample)
    return [
        HeldOutPrompt(sample.number, domain, sample.token_ids[: sample.prompt_tokens])
        for domain in sorted(by_domain)
        for sample in by_domain[domain][: context.recipe.evaluation.prompts_per_domain]
    ]


def _measure(context: RunContext, prompts: Sequence[HeldOutPrompt]) -> list[Measurement]:
    """Both engines, side by side, on the same prompts."""
    recipe = context.recipe
    threads = os.cpu_count() or 1
    plain = context.actors.engine(PLAIN, MeasuredEngine, PLAIN_ENGINE_ARGS, threads)
    draft_args = draft_engine_args(
        context.frame.folder.draft.resolve(),
        draft_tokens=draft_tokens(context),
        accelerator=recipe.resources.accelerator,
        confidence_cut=recipe.serving.confidence_cut,
        draft_sampling=recipe.serving.draft_sampling,
        rejection_method=recipe.serving.rejection_method,
    )
    drafted = context.actors.engine(DRAFTED, MeasuredEngine, draft_args | DRAFT_ENGINE_ARGS, threads)
    measurements = measure(
        plain,
        drafted,
        prompts,
        max_tokens=recipe.evaluation.max_tokens,
        serving_cut=recipe.serving.confidence_cut if recipe.resources.accelerator == "cpu" else None,
        progress=context.frame.progress.say,
    )
    for name in (PLAIN, DRAFTED):
        context.actors.end(name)
    return measurements


def _walk_estimate(context: RunContext, prompts: Sequence[HeldOutPrompt]) -> float:
    """The acceptance length that the served draft should reach: walks over the target's own greedy answers."""
    import ray

    recipe, replica = context.recipe, context.actors.replicas()[0]
    answers = ray.get(
        [
            replica.generate.remote(context.key("ask", prompt.number), prompt.token_ids, recipe.evaluation.max_tokens)
            for prompt in prompts
        ]
    )
    manifests = ray.get(
        [
            replica.capture.remote(context.key("walk", prompt.number), (*prompt.token_ids, *answer.token_ids))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    )
    samples = [
        EstimatedSample(manifest, len(prompt.token_ids)) for prompt, manifest in zip(prompts, manifests, strict=True)
    ]
    task = remote_task(run_walk_estimate, recipe, threads=os.cpu_count() or 1)
    return ray.get(
        task.remote(
            str(context.frame.folder.draft.resolve()),
            str(context.target.path),
            samples,
            context.actors.store(),
            draft_tokens(context),
            recipe.resources.accelerator,
        )
    )
