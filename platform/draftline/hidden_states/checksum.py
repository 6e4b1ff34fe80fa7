"""The checksum that travels with hidden states, as one more small tensor of their payload.

Mooncake keeps none, and the manifest leaves before the states are there: it cannot carry one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from hs_connectors.mooncake_store import packed_layout

CHECKSUM = "checksum"
CHECKSUM_BYTES = 16


def add_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    """Makes room for the checksum behind the tensors that a manifest describes; changes it and returns it."""
    layout, size = packed_layout({CHECKSUM: ((CHECKSUM_BYTES,), torch.uint8)})
    place = manifest["metadata"]["total_aligned_bytes"]
    manifest["tensors"][CHECKSUM] = layout[CHECKSUM] | {"offset": place}
    manifest["metadata"]["total_aligned_bytes"] = place + size
    return manifest


def checksum(manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """xxh3 of 128 bits, uint8 [16], over the handle and each tensor's name, shape, dtype and bytes.

    The tensors lie on the host and are taken in the manifest's order, the checksum itself left out. KeyError when
    one is missing.
    """
    digest = xxhash.xxh3_128(repr(str(manifest["handle"])).encode())
    for name in manifest["tensors"]:
        if name == CHECKSUM:
            continue
        tensor = tensors[name]
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        raw: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(raw)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
