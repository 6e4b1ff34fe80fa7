"""Where a draft ends: pure arithmetic on confidences and measured costs.

The confidence head gives each drafted token the probability that the target accepts it, given that it accepted those
before. The running product is the token's survival. Verifying a token costs time whether it survives or not, so a draft
ends before the first token whose survival is below the cut.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Cut = float | Literal["auto"]

OPTIONS = "draftline"
CONFIDENCE_CUT = "confidence_cut"
# Mean chance that a drafted token is accepted after its predecessors were; the cut depends on it only weakly.
ACCEPTANCE_GUESS = 0.5


def read_cut(additional_config: Mapping[str, Any] | None) -> Cut:
    """The cut that vLLM's `additional_config={"draftline": {"confidence_cut": ...}}` asks for; 0 when it says nothing.

    Raises ValueError for an unknown option or a value that is neither "auto" nor a number from 0 to 1.
    """
    options = (additional_config or {}).get(OPTIONS) or {}
    unknown = sorted(set(options) - {CONFIDENCE_CUT})
    if unknown:
        raise ValueError(f"additional_config.{OPTIONS}: unknown option {unknown[0]!r}; allowed: {CONFIDENCE_CUT}")
    cut = options.get(CONFIDENCE_CUT, 0.0)
    if cut == "auto":
        return "auto"
    if isinstance(cut, bool) or not isinstance(cut, int | float) or not 0.0 <= cut <= 1.0:
        raise ValueError(f'additional_config.{OPTIONS}.{CONFIDENCE_CUT}: found {cut!r}; allowed: 0 to 1, or "auto"')
    return float(cut)


def cut_drafts(drafts: Sequence[Sequence[int]], confidences: Sequence[Sequence[float]], cut: float) -> list[list[int]]:
    """Each request's drafted tokens up to, and without, the first whose survival is below `cut`; may be none.

    `drafts` and `confidences` hold one sequence of the same length per request.
    """
    return [list(draft[: kept_tokens(row, cut)]) for draft, row in zip(drafts, confidences, strict=True)]


def kept_tokens(confidences: Sequence[float], cut: float) -> int:
    """How many leading tokens have a survival (running product of `confidences`) of at least `cut`."""
    survival = 1.0
    for kept, confidence in enumerate(confidences):
        survival *= confidence
        if survival < cut:
            return kept
    return len(confidences)


def threshold(step_costs_s: Sequence[float], acceptance_guess: float = ACCEPTANCE_GUESS) -> float:
    """The survival below which verifying a token slows decoding down, from 0 to 1.

    `step_costs_s[k]` is the time of a decode step that verifies k drafted tokens, draft pass included, in seconds.

    A long run of steps emits E[tokens] / E[time] tokens a second. The policy that maximises this rate r takes, in each
    step, the draft length that maximises tokens - r * time (Dinkelbach's method for ratios). One more token adds its
    survival s to the tokens and dc to the time: it is worth its time as long as s >= r * dc. dc is the costs'
    slope over all k, as differences of neighbours are mostly noise, and r the best rate that a draft with the constant
    `acceptance_guess` a reaches: max over k of (1 + a + ... + a^k) / step_costs_s[k]. Raises ValueError for fewer than
    two costs.
    """
    if len(step_costs_s) < 2:
        raise ValueError(
            f"at least 2 step costs, for 0 and for 1 drafted tokens, are needed; found {len(step_costs_s)}"
        )
    rate, tokens, survival = 0.0, 0.0, 1.0
    for cost_s in step_costs_s:
        tokens += survival
        survival *= acceptance_guess
        rate = max(rate, tokens / cost_s)
    return min(rate * max(_slope(step_costs_s), 0.0), 1.0)


def _slope(values: Sequence[float]) -> float:
    """Median slope between any two of the points (k, values[k]) (Theil-Sen): a few disturbed times do not move it."""
    points = list(enumerate(values))
    return statistics.median((b - a) / (y - x) for i, (x, a) in enumerate(points) for y, b in points[i + 1 :])
