"""Watches over the Mooncake master: has one that died started again, and says when nobody can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from draftline.hidden_states.replicas import last_line
from draftline.hidden_states.store import StoreUnavailable

WATCH_S = 1.0
# The driver notices a lost master and makes another one meanwhile.
MASTER_WAIT_S = 60.0


class MasterGone(StoreUnavailable):
    """The master's actor is gone or cannot start its process again, and no other one came in time."""


class MasterWatch:
    """Of one master, a handle of `MooncakeMaster`.

    `restarted(times)` is awaited whenever it was started again, `gone(problem)` called once when it is found to be
    beyond starting again.
    """

    def __init__(self, master: Any, gone: Callable[[str], None], restarted: Callable[[int], Awaitable[None]]) -> None:
        self._master, self._gone, self._restarted = master, gone, restarted
        self._restarts: int | None = None
        self._away_since: float | None = None
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Looks every `WATCH_S` seconds. Raises MasterGone."""
        while True:
            await self.check()
            await asyncio.sleep(WATCH_S)

    async def check(self) -> None:
        """Looks once. Raises MasterGone when the master has been away for `MASTER_WAIT_S` seconds."""
        async with self._turn:
            try:
                restarts = await self._master.ensure.remote()
            except RayError as error:
                self._miss(last_line(error))
                return
            self._away_since = None
            times = restarts - (restarts if self._restarts is None else self._restarts)
            self._restarts = restarts
            if times:
                await self._restarted(times)

    def _miss(self, reason: str) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self._gone(f"the Mooncake master is gone: {reason}")
        elif now - self._away_since >= MASTER_WAIT_S:
            raise MasterGone(f"the Mooncake master is gone, and no other one came within {MASTER_WAIT_S:g} s: {reason}")
