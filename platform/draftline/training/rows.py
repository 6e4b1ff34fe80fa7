"""Packing: the samples of one row, with their hidden states, become one set of model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleStates:
    """One sample as the store gave it."""

    hidden_states: Tensor  # [T, taps + 1, H]; the last entry is the target's last layer, before its final norm
    token_ids: Tensor  # [T]
    prompt_tokens: int
    number: int = -1  # the sample's in the run; -1: none of the plan's


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Inputs of one forward pass; T is padded, and padding has document id -1."""

    hidden_states: Tensor  # [1, T, taps * H]
    input_ids: Tensor  # [1, T]
    loss_mask: Tensor  # bool [1, T]
    verifier_last_hidden_states: Tensor  # [1, T, H]
    document_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], from 0 in each sample
    anchors: int  # how many positions can start a block
    tokens: int  # tokens that are not padding

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors by the names that the model knows, on `device`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor.to(device) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are laid out."""

    block_size: int
    anchor_first: bool
    taps: int
    hidden_size: int
    fixed_tokens: int | None = None  # None: as short as the samples allow; a number: always so long (compiled models)
    multiple: int = 64

    def length(self, tokens: int) -> int:
        """Padded length of a row. A whole block of padding lets blocks start at the last answer's end."""
        wanted = (self.fixed_tokens or tokens) + self.block_size
        return -(-wanted // self.multiple) * self.multiple


def pack_row(samples: Sequence[SampleStates], packing: Packing) -> PackedRow:
    """Packs samples one after another; no sample at all gives a row of padding, whose loss is zero.

    The loss mask covers the states that predict the target's own tokens. With anchor-first blocks slot k at position
    p + k predicts the token after it, so these are the states' positions; with 1+N blocks slot k predicts the token at
    its own position, so the mask is that of the answer's tokens.
    """
    tokens = sum(len(sample.token_ids) for sample in samples)
    total = packing.length(tokens)
    states = torch.zeros(total, packing.taps + 1, packing.hidden_size)
    ids, positions = torch.zeros(total, dtype=torch.long), torch.zeros(total, dtype=torch.long)
    documents = torch.full((total,), -1)
    mask = torch.zeros(total, dtype=torch.bool)
    shift = 1 if packing.anchor_first else 0
    begin = 0
    for number, sample in enumerate(samples):
        length = len(sample.token_ids)
        end = begin + length
        states[begin:end] = sample.hidden_states  # converts to float32 as well
        ids[begin:end] = sample.token_ids
        positions[begin:end] = torch.arange(length)
        documents[begin:end] = number
        mask[begin + sample.prompt_tokens - shift : end - shift] = True
        begin = end
    return PackedRow(
        hidden_states=states[:, :-1].reshape(1, total, -1),
        input_ids=ids[None],
        loss_mask=mask[None],
        verifier_last_hidden_states=states[None, :, -1],
        document_ids=documents[None],
        position_ids=positions[None],
        anchors=int(mask[: total - packing.block_size].sum()),
        tokens=tokens,
    )
