"""The walk estimate: the acceptance length that serving would measure, without serving.

A served engine starts a block only where the last one ended, so easy stretches are skipped over and hard places weigh
more than in a mean over all positions. The walk does the same: from the first answer token, count the accepted prefix
of the block that starts there, step over it and over the target's own next token, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from draftline.training.model import DraftModel

ANCHORS_AT_ONCE = 64


def walk(
    choices: Sequence[Sequence[int]], token_ids: Sequence[int], prompt_tokens: int, max_tokens: int | None = None
) -> tuple[int, int]:
    """Walks over one greedy answer; returns (accepted draft tokens, blocks). Acceptance length = 1 + accepted / blocks.

    `choices[i]` is what the draft says with answer token i (`token_ids[prompt_tokens + i]`) as anchor. An engine drafts
    as long as the answer goes on: no block starts at its last token, nor at its `max_tokens`-th. It counts accepted
    tokens before it cuts the answer, so they may lie beyond `max_tokens`, as far as `token_ids` tell what they are.
    """
    answer = token_ids[prompt_tokens:]
    end = len(answer) if max_tokens is None else min(len(answer), max_tokens)
    accepted = blocks = position = 0
    while position < end - 1:
        count = 0
        for drafted, true in zip(choices[position], answer[position + 1 :], strict=False):
            if drafted != true:
                break
            count += 1
        accepted += count
        blocks += 1
        position += count + 1
    return accepted, blocks


def draft_choices(
    model: DraftModel,
    hidden_states: Tensor,  # [T, taps * H] or [T, taps + 1, H]
    token_ids: Tensor,  # [T]
    anchors: Sequence[int],
    draft_tokens: int | None = None,
) -> list[list[int]]:
    """Greedily drafted target token ids at each anchor, `draft_tokens` each (None: all that a block drafts).

    Each is conditioned on the true tokens before it, which is the same as serving as long as the prefix is accepted.
    `anchors` ascend. The model is put into evaluation mode.
    """
    import torch

    model.eval()
    drafted = model.max_draft_tokens if draft_tokens is None else draft_tokens
    states = hidden_states[:, :-1].flatten(1) if hidden_states.dim() == 3 else hidden_states
    length, device = len(token_ids), model.fc.weight.device
    with torch.no_grad(), model.block_of(drafted):
        # Blocks at the end reach beyond the answer: a block of padding takes them, their choices there mean nothing.
        padding = model.block_size
        states = torch.nn.functional.pad(states.float(), (0, 0, 0, padding))[None].to(device)
        ids = torch.nn.functional.pad(token_ids.long(), (0, padding))[None].to(device)
        chosen: list[list[int]] = []
        for first in range(0, len(anchors), ANCHORS_AT_ONCE):
            part = torch.tensor(anchors[first : first + ANCHORS_AT_ONCE], device=device)
            if len(part) and not 0 <= int(part[-1]) < length:
                raise ValueError(f"anchor {int(part[-1])} is outside the sample of {length} tokens")
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[0, part] = True
            hidden, logits = model.block_outputs(states, ids, mask, len(part))
            start = 0 if model.anchor_first else 1
            hidden, logits = hidden[:, start:], logits[:, start:]
            if model.markov_head is not None:
                # [anchors, drafted]: the token before each drafted one
                before = ids[0, part[:, None] + torch.arange(drafted, device=device)]
                logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
            choice = logits.argmax(-1)
            if model.d2t is not None:
                choice = choice + model.d2t[choice]
            chosen += choice.tolist()
    return chosen


def walk_estimate(
    model: DraftModel,
    hidden_states: Tensor,
    token_ids: Tensor,
    prompt_tokens: int,
    *,
    draft_tokens: int | None = None,
    max_tokens: int | None = None,
) -> tuple[int, int]:
    """(accepted, blocks) of one sample: `draft_choices` at every answer token, then `walk`."""
    choices = draft_choices(model, hidden_states, token_ids, range(prompt_tokens, len(token_ids)), draft_tokens)
    return walk(choices, token_ids.tolist(), prompt_tokens, max_tokens)
