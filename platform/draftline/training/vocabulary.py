"""Which of the target's tokens the draft can say: the reduced draft vocabulary, from the answers' own token counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from draftline.errors import InputError


def choose_vocabulary(
    token_counts: Mapping[int, int], vocab_size: int, size: int, always: Iterable[int] = ()
) -> list[int]:
    """The target token ids that make up the draft vocabulary, sorted; exactly `size` of them.

    `token_counts` are the counts over the training answers, `vocab_size` is the target's, `always` are ids kept
    whatever their count (end of turn, special tokens). The most frequent tokens come first, ties by id; when the
    answers use fewer tokens than `size`, the lowest unused ids fill up. Raises `InputError`.
    """
    if not 1 <= size <= vocab_size:
        raise InputError(f"draft.vocab_size is {size}, but the target has {vocab_size} tokens: 1 to that is allowed")
    must = sorted(set(always))
    outside = [token for token in (*must, *token_counts) if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token {outside[0]} is outside the target's vocabulary of {vocab_size}")
    if len(must) > size:
        raise InputError(f"draft.vocab_size is {size}, but {len(must)} special tokens must be in it")
    kept = set(must)
    by_count = sorted(token_counts, key=lambda token: (-token_counts[token], token))
    for token in (*by_count, *range(vocab_size)):
        if len(kept) == size:
            break
        kept.add(token)
    return sorted(kept)


def covered_share(token_counts: Mapping[int, int], kept: Iterable[int]) -> float:
    """Share (0 to 1) of the counted tokens that the draft vocabulary can say; 1.0 when nothing was counted."""
    total = sum(token_counts.values())
    return sum(token_counts.get(token, 0) for token in kept) / total if total else 1.0
