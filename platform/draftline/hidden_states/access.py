"""The store for a process that runs an event loop: one thread at a time, and a store that is away is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from draftline.hidden_states.store import StoreClient, StoreUnavailable

# How long a store may be away: a master that died is started again within seconds.
AWAY_S = 60.0
RETRY_S = 0.5

Result = TypeVar("Result")


class StoreAccess:
    """`StoreClient` with awaitable calls. They raise StoreUnavailable when the store stays away."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._turn = asyncio.Lock()

    async def delete(self, handles: Sequence[str]) -> None:
        """Removes states and error markers, read or not."""
        await self._call(lambda: self._client.delete(handles))

    async def missing(self, handles: Sequence[str]) -> list[str]:
        """Those handles that hold neither states nor an error marker."""
        return await self._call(lambda: self._client.missing(handles))

    async def close(self) -> None:
        """Leaves the store once calls under way have ended."""
        async with self._turn:
            await asyncio.to_thread(self._client.close)

    async def _call(self, work: Callable[[], Result]) -> Result:
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                async with self._turn:
                    return await asyncio.to_thread(work)
            except StoreUnavailable:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)
