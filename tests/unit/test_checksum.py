"""The checksum of hidden states: whatever differs from what was written shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hs_connectors.mooncake_store import packed_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.hidden_states.capacity import StatesShape
from draftline.hidden_states.checksum import CHECKSUM, CHECKSUM_BYTES, add_checksum, checksum

Tensors = dict[str, torch.Tensor]


def make_manifest(handle: str, tensors: Tensors) -> dict[str, Any]:
    layout, size = packed_layout({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    return {"handle": handle, "tensors": layout, "metadata": {"total_aligned_bytes": size}}


def make_tensors(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    states = torch.arange(tokens * 6, dtype=torch.float32).view(tokens, 2, 3).to(dtype)
    return {"hidden_states": states, "token_ids": torch.arange(tokens)}


@given(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(deadline=None)
def test_the_room_for_it_lies_behind_the_tensors(tokens: int, dtype: torch.dtype) -> None:
    manifest = add_checksum(make_manifest("key", make_tensors(tokens, dtype)))
    places = list(manifest["tensors"].values())
    for place, following in pairwise(places):
        assert place["offset"] + place["nbytes"] <= following["offset"]
    assert places[-1]["nbytes"] == CHECKSUM_BYTES and list(manifest["tensors"])[-1] == CHECKSUM
    assert manifest["metadata"]["total_aligned_bytes"] == StatesShape(2, 3, dtype.itemsize).sample_bytes(tokens)


@given(st.integers(1, 9), st.data())
@settings(deadline=None)
def test_one_flipped_bit_shows(tokens: int, data: st.DataObject) -> None:
    tensors = make_tensors(tokens)
    manifest = add_checksum(make_manifest("key", tensors))
    written = checksum(manifest, tensors)
    assert written.equal(checksum(manifest, {name: tensor.clone() for name, tensor in tensors.items()}))
    raw = tensors[data.draw(st.sampled_from(sorted(tensors)))].view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not written.equal(checksum(manifest, tensors))


def test_handle_names_shapes_and_types_count() -> None:
    zeros = {"hidden_states": torch.zeros(4, 2, 3), "more": torch.zeros(4, 2, 3)}
    others = [
        ("other", zeros),
        ("key", dict(reversed(zeros.items()))),
        ("key", zeros | {"more": torch.zeros(4, 3, 2)}),
        ("key", zeros | {"more": torch.zeros(4, 2, 3, dtype=torch.int32)}),
        ("key", {"hidden_states": zeros["hidden_states"]}),
    ]
    seen = [checksum(add_checksum(make_manifest(key, tensors)), tensors) for key, tensors in [("key", zeros), *others]]
    assert len({bytes(each.tolist()) for each in seen}) == len(seen)


def test_what_lies_apart_in_memory_counts_as_what_it_holds() -> None:
    tensors = make_tensors(5)
    manifest = add_checksum(make_manifest("key", tensors))
    apart = tensors["hidden_states"].transpose(0, 2).contiguous().transpose(0, 2)
    assert not apart.is_contiguous()
    assert checksum(manifest, tensors).equal(checksum(manifest, tensors | {"hidden_states": apart}))
