"""Measures a draft: the same held-out prompts answered greedily with and without it, by two engine actors.

At batch 1 the two engines take turns, prompt by prompt, so that whatever else happens on the machine falls on both
alike. Afterwards the draft engine answers all prompts at once, with uncut drafts: that is what the walk estimate
predicts, and it shows whether answers stay the same under load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import ray

from draftline.evaluation.answers import Answer, HeldOutPrompt, Measurement

WARM_UP_TOKENS = 8
Progress = Callable[[str], None]


def measure(
    plain_engine: Any,
    draft_engine: Any,
    prompts: Sequence[HeldOutPrompt],
    *,
    max_tokens: int,
    serving_cut: float | Literal["auto"] | None,
    timeout_s: float = 600.0,
    progress: Progress = lambda line: None,
) -> list[Measurement]:
    """Answers every prompt with both engines (handles of started `MeasuredEngine` actors).

    `serving_cut` is the confidence cut that the draft engine was started with, the same as in serving; none: the engine
    cannot cut (GPU), and drafts stay as they are. `timeout_s` bounds each wait for an answer. Errors of the engines
    propagate.
    """
    if not prompts:
        raise ValueError("no prompts to measure with")
    for name, engine in (("plain", plain_engine), ("draft", draft_engine)):
        ray.get(engine.measure.remote(f"warm-up-{name}", prompts[0].token_ids, WARM_UP_TOKENS), timeout=timeout_s)
    plain, served = _take_turns(plain_engine, draft_engine, prompts, max_tokens, timeout_s, progress)
    if serving_cut is not None:
        cut = ray.get(draft_engine.set_confidence_cut.remote(0.0), timeout=timeout_s)
        progress(f"drafts were cut at {cut:.3f}; now uncut, {len(prompts)} prompts at once")
    uncut = ray.get(
        [draft_engine.measure.remote(f"uncut-{p.number}", p.token_ids, max_tokens) for p in prompts],
        timeout=timeout_s * len(prompts),
    )
    return [
        Measurement(prompt.number, prompt.domain, *answers)
        for prompt, *answers in zip(prompts, plain, served, uncut, strict=True)
    ]


def _take_turns(
    plain_engine: Any,
    draft_engine: Any,
    prompts: Sequence[HeldOutPrompt],
    max_tokens: int,
    timeout_s: float,
    progress: Progress,
) -> tuple[list[Answer], list[Answer]]:
    """Answers without and with the draft, one request at a time; which engine goes first alternates."""
    plain: list[Answer] = []
    served: list[Answer] = []
    for index, prompt in enumerate(prompts):
        turns = [("plain", plain_engine, plain), ("served", draft_engine, served)]
        for name, engine, answers in turns if index % 2 == 0 else reversed(turns):
            request = engine.measure.remote(f"{name}-{prompt.number}", prompt.token_ids, max_tokens)
            answers.append(ray.get(request, timeout=timeout_s))
        ratio = plain[-1].seconds / served[-1].seconds
        progress(f"prompt {index + 1}/{len(prompts)} ({prompt.domain}): {ratio:.2f}x with the draft")
    return plain, served
