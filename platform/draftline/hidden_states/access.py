"""The store for a process that runs an event loop: one thread at a time, and a store that is away is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from draftline.hidden_states.store import StoreClient, StoreUnavailable

# How long a store may be away: a master that died is started again within seconds, and another one takes the place of
# one that is lost for good within watch.MASTER_WAIT_S.
AWAY_S = 90.0
RETRY_S = 0.5

Result = TypeVar("Result")


class StoreAccess:
    """`StoreClient` with awaitable calls. They raise StoreUnavailable when the store stays away."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._turn = asyncio.Lock()
        self._moving = False

    async def delete(self, handles: Sequence[str]) -> None:
        """Removes states and error markers, read or not."""
        await self._call(lambda: self._client.delete(handles))

    async def missing(self, handles: Sequence[str]) -> list[str]:
        """Those handles that hold neither states nor an error marker."""
        return await self._call(lambda: self._client.missing(handles))

    async def clear_prefixed(self, key_prefix: str) -> int:
        """Removes all states of keys that begin with `key_prefix` and a dash; returns how many objects."""
        return await self._call(lambda: self._client.clear_prefixed(key_prefix))

    async def rejoin(self, master_address: str) -> None:
        """Moves to the store of another master; calls that wait for the old one go on there."""
        self._moving = True  # each call to a master that is gone takes seconds: it is not called any more
        try:
            await self._call(lambda: self._client.rejoin(master_address), moving=True)
        finally:
            self._moving = False

    async def close(self) -> None:
        """Leaves the store once calls under way have ended."""
        async with self._turn:
            await asyncio.to_thread(self._client.close)

    async def _call(self, work: Callable[[], Result], *, moving: bool = False) -> Result:
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                async with self._turn:
                    if self._moving == moving:
                        return await asyncio.to_thread(work)
            except StoreUnavailable:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)
