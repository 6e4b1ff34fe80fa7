"""Attention of anchored blocks without a dense mask, for CPUs.

A draft row holds the target's hidden states of several samples and one block of queries per anchor. A query sees
its own block and the states of its own sample before its anchor, nothing else. The dense mask of the library's eager
attention multiplies every query with every other block and every other sample; here each sample is one small product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

BLOCK_ATTENTION = "draftline_block_attention"


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """The anchors of one sample and what they may see."""

    anchors: slice
    states: slice
    hidden: Tensor  # bool [anchors, states]: True where a state must not be seen


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Who sees what in one row; takes the place of the attention mask."""

    block_size: int
    spans: tuple[SampleSpan, ...]
    causal: bool  # within a block: only the slots up to the query's own


def block_mask(
    document_ids: Tensor,  # [T]; -1 = padding
    anchors: Tensor,  # [A] positions, ascending within a sample
    block_size: int,
    window: int | None,
    causal: bool,
) -> BlockMask:
    """The mask of a row. `window`: an anchor sees only so many states before itself."""
    positions = torch.arange(len(document_ids))
    samples, counts = torch.unique_consecutive(document_ids[anchors], return_counts=True)
    spans, first = [], 0
    for sample, count in zip(samples.tolist(), counts.tolist(), strict=True):
        own = positions[document_ids == sample] if sample >= 0 else positions[:0]
        begin = int(own[0]) if len(own) else 0
        # Samples lie in one piece, so the states before the sample's last anchor are all that any of them sees.
        end = int(anchors[first : first + count].max()) if len(own) else 0
        seen = anchors[first : first + count, None] - positions[None, begin:end]  # [anchors, states] distance
        hidden = seen <= 0 if window is None else (seen <= 0) | (seen > window)
        spans.append(SampleSpan(slice(first, first + count), slice(begin, end), hidden))
        first += count
    return BlockMask(block_size, tuple(spans), causal)


def block_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, A * block, D]
    key: Tensor,  # [1, kv_heads, T + A * block, D]
    value: Tensor,  # [1, kv_heads, T + A * block, D]
    attention_mask: BlockMask,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, A * block, heads, D]."""
    heads, queries, size = query.shape[1:]
    kv_heads = key.shape[1]
    block = attention_mask.block_size
    states = key.shape[2] - queries
    query = query * (size**-0.5 if scaling is None else scaling)
    query = query.view(kv_heads, heads // kv_heads, queries // block, block, size)
    key_states, key_blocks = key[0].split([states, queries], dim=1)
    value_states, value_blocks = value[0].split([states, queries], dim=1)
    key_blocks = key_blocks.reshape(kv_heads, 1, queries // block, block, size)
    value_blocks = value_blocks.reshape(kv_heads, 1, queries // block, block, size)
    own = query @ key_blocks.transpose(-1, -2)  # [kv, group, A, block, block]
    if attention_mask.causal:
        own = own.masked_fill(torch.ones(block, block, dtype=torch.bool).triu(1), float("-inf"))
    outputs = []
    for span in attention_mask.spans:
        part = query[:, :, span.anchors]  # [kv, group, a, block, D]
        shape = part.shape[:4]
        rows = shape[1:].numel()
        scores = part.reshape(kv_heads, rows, size) @ key_states[:, span.states].transpose(-1, -2)
        scores = scores.view(*shape, scores.shape[-1]).masked_fill(span.hidden[None, None, :, None], float("-inf"))
        weights = torch.cat([scores, own[:, :, span.anchors]], dim=-1).softmax(-1)
        to_states, to_own = weights.split([scores.shape[-1], block], dim=-1)
        output = to_states.reshape(kv_heads, rows, scores.shape[-1]) @ value_states[:, span.states]
        outputs.append(output.view(*shape, size) + to_own @ value_blocks[:, :, span.anchors])
    output = torch.cat(outputs, dim=2)  # [kv, group, A, block, D]
    return output.reshape(heads, queries, size).transpose(0, 1).unsqueeze(0).contiguous(), None


AttentionInterface.register(BLOCK_ATTENTION, block_attention)
