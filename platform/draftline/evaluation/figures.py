"""From measured answers to the figures of the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftline.evaluation.answers import Answer, Measurement


def acceptance_length(answers: Iterable[Answer]) -> float:
    """Tokens that one pass of the target yields: 1 (the bonus token) + accepted tokens / drafts; 1.0 without drafts."""
    accepted = drafts = 0
    for answer in answers:
        accepted += sum(answer.accepted)
        drafts += len(answer.accepted)
    return 1.0 + accepted / drafts if drafts else 1.0


def acceptance_per_position(answers: Sequence[Answer]) -> list[float]:
    """Share of all drafts whose k-th token was kept, k = 1.. up to the longest draft."""
    kept = [count for answer in answers for count in answer.accepted]
    longest = max((length for answer in answers for length in answer.drafted), default=0)
    return [sum(count >= k for count in kept) / len(kept) for k in range(1, longest + 1)]


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
    parts are of uncut drafts, which the estimate speaks of; `_cut` is what serving's drafts reach. The gap is relative.
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
        "acceptance_length_cut": acceptance_length(served),
        "estimate_acceptance_length": estimate,
        "estimate_gap": abs(measured - estimate) / estimate,
        "identical_share": identical_share([(m.plain, m.served) for m in measurements]),
        "identical_share_batched": identical_share([(m.plain, m.uncut) for m in measurements]),
        "tokens_per_s_plain": tokens_per_s(plain),
        "tokens_per_s_draft": tokens_per_s(served),
        "speedup_batch1": tokens_per_s(served) / tokens_per_s(plain),
        "drafted_per_pass_cut": _mean([length for answer in served for length in answer.drafted]),
    }
    for k, share in enumerate(acceptance_per_position(uncut), start=1):
        figures[f"acceptance_per_position.{k}"] = share
    for domain in sorted({m.domain for m in measurements}):
        figures[f"acceptance.{domain}"] = acceptance_length(m.uncut for m in measurements if m.domain == domain)
    return {f"evaluate.{name}": value for name, value in figures.items()}


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
