"""The served check: vLLM with the draft must do what the estimate says, and say what the target alone says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftline.errors import RunFailed
from draftline.evaluation.answers import Measurement


class ServedCheckFailed(RunFailed):
    """The draft in vLLM is not the draft that was trained, or it changes the target's answers. Says the numbers."""


def check_served(figures: Mapping[str, float], measurements: Sequence[Measurement], tolerance: float) -> None:
    """Passes when every greedy answer with the draft equals the one without, and the acceptance fits the estimate.

    `figures` come from `evaluation_figures`; `tolerance` is the allowed relative gap between acceptance and estimate.
    """
    for m in measurements:
        if m.plain.token_ids != m.served.token_ids:
            raise ServedCheckFailed(_difference(m, figures["evaluate.identical_share"]))
    gap = figures["evaluate.estimate_gap"]
    if gap > tolerance:
        raise ServedCheckFailed(
            f"acceptance length in vLLM is {figures['evaluate.acceptance_length']:.3f}, the walk estimate "
            f"{figures['evaluate.estimate_acceptance_length']:.3f}: they differ by {gap:.1%}, "
            f"allowed is {tolerance:.1%}"
        )


def _difference(m: Measurement, share: float) -> str:
    plain, served = m.plain.token_ids, m.served.token_ids
    at = next((i for i, (a, b) in enumerate(zip(plain, served, strict=False)) if a != b), min(len(plain), len(served)))
    found = [tokens[at] if at < len(tokens) else "nothing" for tokens in (plain, served)]
    return (
        f"greedy answers with and without the draft are equal on {share:.1%} of the prompts, 100% is wanted; first on "
        f"prompt {m.number} ({m.domain}): token {at} is {found[0]} without the draft and {found[1]} with it"
    )
