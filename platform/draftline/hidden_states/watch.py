"""Watches over the Mooncake master: has one that died started again, and says when nobody can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import RayError

from draftline.errors import RunFailed
from draftline.hidden_states.replicas import last_line

WATCH_S = 1.0
# The driver notices a lost master and makes another one meanwhile.
MASTER_WAIT_S = 60.0


class MasterGone(RunFailed):
    """The master's actor is gone or cannot start its process again, and no other one came in time."""


async def master_restarts(master: Any, notice: Callable[[str], None]) -> AsyncIterator[int]:
    """Yields whenever the master (a handle of `MooncakeMaster`) was started again: how often since the last time.

    `notice` is told once when the master is found to be beyond starting again. Raises MasterGone when that lasts for
    `MASTER_WAIT_S` seconds; whoever attaches another master before ends the watch.
    """
    seen: int | None = None
    away_since: float | None = None
    while True:
        try:
            restarts = await master.ensure.remote()
        except RayError as error:
            reason = last_line(error)
            if away_since is None:
                away_since = time.monotonic()
                notice(f"the Mooncake master is gone: {reason}")
            elif time.monotonic() - away_since >= MASTER_WAIT_S:
                raise MasterGone(
                    f"the Mooncake master is gone, and no other one came within {MASTER_WAIT_S:g} s: {reason}"
                ) from error
        else:
            away_since = None
            if seen is not None and restarts > seen:
                yield restarts - seen
            seen = restarts
        await asyncio.sleep(WATCH_S)
