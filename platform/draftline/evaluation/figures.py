"""From measured answers to the figures of the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftline.evaluation.answers import Answer, Measurement


def kept(answer: Answer) -> list[int]:
    """Accepted tokens of each draft that are part of the answer: the last draft may have reached beyond its end.

    Holds for drafts that are never cut, where each pass of the target verifies one.
    """
    inside = list(answer.accepted)
    if inside:
        left = len(answer.token_ids) - 1 - sum(count + 1 for count in inside[:-1])
        inside[-1] = min(inside[-1], left)
    return inside


def acceptance_length(answers: Iterable[Answer]) -> float:
    """Tokens that one pass of the target yields: 1 (the bonus token) + accepted tokens / drafts; 1.0 without drafts.

    As the walk estimate does, it counts what the answers hold.
    """
    counts = [count for answer in answers for count in kept(answer)]
    return 1.0 + sum(counts) / len(counts) if counts else 1.0


def acceptance_per_position(answers: Sequence[Answer]) -> list[float]:
    """Share of all drafts whose k-th token was kept, k = 1.. up to the longest draft."""
    counts = [count for answer in answers for count in kept(answer)]
    longest = max((length for answer in answers for length in answer.drafted), default=0)
    return [sum(count >= k for count in counts) / len(counts) for k in range(1, longest + 1)]


def passes(answer: Answer) -> int:
    """Passes of the target after the prompt's: those that verified a draft, and those that had none to verify.

    Each pass yields its accepted tokens and one more, so the rest of the tokens came from passes without a draft.
    """
    return max(len(answer.accepted), len(answer.token_ids) - 1 - sum(answer.accepted))


def tokens_per_pass(answers: Sequence[Answer]) -> float:
    """Tokens of the answers, each one's first aside, per pass of the target; none beyond an answer's end counts."""
    count = sum(passes(answer) for answer in answers)
    return sum(len(answer.token_ids) - 1 for answer in answers) / count if count else 1.0


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """Output tokens per second over all answers, prompts' prefill included."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(len(answer.token_ids) for answer in answers) / seconds


def identical_share(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    """Share of prompts whose two answers are equal token for token."""
    return sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs)


def evaluation_figures(measurements: Sequence[Measurement], estimate: float) -> dict[str, float]:
    """The `evaluate.*` figures.

    `estimate` is the offline walk estimate of the acceptance length on the same prompts. `acceptance_length` and its
    parts are of uncut drafts, which the estimate speaks of; `_cut` is what serving's drafts reach, passes without any
    included. The gap is relative.
    """
    if not measurements:
        raise ValueError("no measurements")
    plain = [m.plain for m in measurements]
    served = [m.served for m in measurements]
    uncut = [m.uncut for m in measurements]
    measured = acceptance_length(uncut)
    figures = {
        "prompts": float(len(measurements)),
        "output_tokens": float(sum(len(answer.token_ids) for answer in plain)),
        "acceptance_length": measured,
        "acceptance_length_cut": tokens_per_pass(served),
        "drafted_per_pass_cut": _share(sum(sum(answer.drafted) for answer in served), sum(map(passes, served))),
        "estimate_acceptance_length": estimate,
        "estimate_gap": abs(measured - estimate) / estimate,
        "identical_share": identical_share([(m.plain, m.served) for m in measurements]),
        "identical_share_batched": identical_share([(m.plain, m.uncut) for m in measurements]),
        "tokens_per_s_plain": tokens_per_s(plain),
        "tokens_per_s_draft": tokens_per_s(served),
        "speedup_batch1": tokens_per_s(served) / tokens_per_s(plain),
    }
    for k, share in enumerate(acceptance_per_position(uncut), start=1):
        figures[f"acceptance_per_position.{k}"] = share
    for domain in sorted({m.domain for m in measurements}):
        figures[f"acceptance.{domain}"] = acceptance_length(m.uncut for m in measurements if m.domain == domain)
    return {f"evaluate.{name}": value for name, value in figures.items()}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
