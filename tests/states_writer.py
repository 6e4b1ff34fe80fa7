"""Writes made-up hidden states into Mooncake, as a replica's connector does: hs-connectors' own store.

`StatesReplica` does so as a Ray actor. As a program: one JSON line [key, tokens, error] in, one line with the
manifest (or the problem) out; a line with a master's address moves it there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hs_connectors.mooncake_store import VERSION, MooncakeStoreConfig, packed_layout

from draftline.hidden_states.checksum import add_checksum
from draftline.hidden_states.writer import PATIENCE_S, PatientStore

LAYERS, HIDDEN_SIZE = 3, 64


class StatesWriter:
    """A store client that offers a segment."""

    def __init__(self, config: dict[str, Any], patience_s: float = PATIENCE_S) -> None:
        self._store = PatientStore(MooncakeStoreConfig.from_dict(config), patience_s).setup()

    def manifest(self, key: str, tokens: int) -> dict[str, Any]:
        """What vLLM's scheduler would answer."""
        shape: Any = (tokens, LAYERS, HIDDEN_SIZE)
        layout, size = packed_layout({"hidden_states": (shape, torch.float32), "token_ids": ((tokens,), torch.int64)})
        return add_checksum(
            {
                "handle": key,
                "version": VERSION,
                "tensors": layout,
                "metadata": {"num_tokens": tokens, "total_aligned_bytes": size},
            }
        )

    def put(self, manifest: dict[str, Any], token_ids: list[int], first: float = 0.0) -> None:
        """Counts up from `first` through the states."""
        shape = (len(token_ids), LAYERS, HIDDEN_SIZE)
        size = shape[0] * shape[1] * shape[2]
        states = (torch.arange(size, dtype=torch.float32) + first).view(shape)
        self._store.put_sample(manifest, {"hidden_states": states, "token_ids": torch.tensor(token_ids)})

    def rejoin(self, master_address: str) -> None:
        """Moves to the store of another master."""
        self._store.rejoin(master_address)

    def close(self) -> None:
        """Takes the segment out of the store."""
        self._store.close()

    def put_error(self, manifest: dict[str, Any], error: str) -> None:
        """The marker that the connector leaves when it cannot write."""
        self._store.put_error(manifest, error)


class StatesReplica:
    """Stands where the vLLM replica would, as an actor: it answers with a manifest, and writes a moment later.

    Samples are told by their first token: it refuses those in `refused`, and leaves those in `forgotten` unwritten when
    it captures them for the first time.
    """

    def __init__(
        self, config: dict[str, Any], delay_s: float, refused: tuple[int, ...], forgotten: tuple[int, ...]
    ) -> None:
        self._writer = StatesWriter(config)
        self._thread = ThreadPoolExecutor(1)
        self._delay_s, self._refused, self._forgotten = delay_s, refused, set(forgotten)
        self._busy = 0

    async def configure(self, delay_s: float, refused: tuple[int, ...], forgotten: tuple[int, ...]) -> None:
        """For the next test, once all that was asked for has been written."""
        while self._busy:
            await asyncio.sleep(0.01)
        await asyncio.wrap_future(self._thread.submit(lambda: None))
        self._delay_s, self._refused, self._forgotten = delay_s, refused, set(forgotten)

    async def capture(self, key: str, token_ids: list[int]) -> dict[str, Any]:
        """The manifest; the states follow."""
        self._busy += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._busy -= 1
        if token_ids[0] in self._refused:
            raise ValueError(f"token {token_ids[0]} is refused")
        manifest = self._writer.manifest(key, len(token_ids))
        if token_ids[0] in self._forgotten:
            self._forgotten.discard(token_ids[0])
            return manifest
        self._thread.submit(self._writer.put, manifest, list(token_ids), float(token_ids[0]))
        return manifest

    async def rejoin(self, master_address: str) -> None:
        """Moves to the store of another master."""
        await asyncio.to_thread(self._writer.rejoin, master_address)

    async def healthy(self) -> bool:
        """Always, while it lives."""
        return True

    async def stop(self) -> None:
        """Leaves the store as a replica that ends in peace does."""
        self._thread.shutdown()
        self._writer.close()

    async def process_id(self) -> int:
        """For those who want to kill it."""
        return os.getpid()


def main() -> None:
    """Serves the lines of stdin."""
    writer = StatesWriter(json.loads(sys.argv[1]), patience_s=0.0)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, str):
            writer.rejoin(request)
            print(json.dumps("moved"), flush=True)
            continue
        key, tokens, error = request
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
