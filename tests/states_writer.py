"""Writes made-up hidden states into Mooncake, as a replica's connector does: hs-connectors' own store.

As a program: one JSON line [key, tokens, error] in, one line with the manifest (or the problem) out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from hs_connectors.mooncake_store import VERSION, MooncakeHiddenStatesStore, MooncakeStoreConfig, packed_layout

LAYERS, HIDDEN_SIZE = 3, 64


class StatesWriter:
    """A store client that offers a segment."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._store = MooncakeHiddenStatesStore(MooncakeStoreConfig.from_dict(config)).setup()

    def manifest(self, key: str, tokens: int) -> dict[str, Any]:
        """What vLLM's scheduler would answer."""
        shape: Any = (tokens, LAYERS, HIDDEN_SIZE)
        layout, size = packed_layout({"hidden_states": (shape, torch.float32), "token_ids": ((tokens,), torch.int64)})
        return {
            "handle": key,
            "version": VERSION,
            "tensors": layout,
            "metadata": {"num_tokens": tokens, "total_aligned_bytes": size},
        }

    def put(self, manifest: dict[str, Any], token_ids: list[int], first: float = 0.0) -> None:
        """Counts up from `first` through the states."""
        shape = (len(token_ids), LAYERS, HIDDEN_SIZE)
        size = shape[0] * shape[1] * shape[2]
        states = (torch.arange(size, dtype=torch.float32) + first).view(shape)
        self._store.put_sample(manifest, {"hidden_states": states, "token_ids": torch.tensor(token_ids)})

    def put_error(self, manifest: dict[str, Any], error: str) -> None:
        """The marker that the connector leaves when it cannot write."""
        self._store.put_error(manifest, error)


def main() -> None:
    """Serves the lines of stdin."""
    writer = StatesWriter(json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        key, tokens, error = json.loads(line)
        manifest = writer.manifest(key, tokens)
        try:
            if error:
                writer.put_error(manifest, error)
            else:
                writer.put(manifest, list(range(tokens)))
        except RuntimeError as problem:
            print(json.dumps(str(problem)), flush=True)
        else:
            print(json.dumps(manifest), flush=True)


if __name__ == "__main__":
    main()
