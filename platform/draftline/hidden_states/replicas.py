"""What a feeder asks of a target replica, and what a failure means: the replica is lost, or only this one capture."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

# A replica that takes longer for one sample hangs.
CAPTURE_TIMEOUT_S = 600.0
# How often a replica is asked whether it and its engine live, and how long it may take to say so.
HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 60.0
# How long a replica may take to move to another master.
REJOIN_TIMEOUT_S = 60.0


class ReplicaLost(RuntimeError):
    """The replica is dead, was killed because it hung, or its engine does not go on; the text says why."""


class CaptureRefused(RuntimeError):
    """The replica lives, but could not capture this sample; the text says why."""


async def capture(replica: Any, key: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """The manifest of the sample's hidden states. Raises ReplicaLost or CaptureRefused."""
    try:
        return await asyncio.wait_for(replica.capture.remote(key, token_ids), CAPTURE_TIMEOUT_S)
    except RayActorError as error:
        ray.kill(replica)  # it may only be out of reach: what it would still write is wanted no more
        raise ReplicaLost(last_line(error)) from error
    except TimeoutError as error:
        ray.kill(replica)
        raise ReplicaLost(f"no answer within {CAPTURE_TIMEOUT_S:g} s") from error
    except RayError as error:
        problem = CaptureRefused if await trouble(replica) is None else ReplicaLost
        raise problem(last_line(error)) from error


async def trouble(replica: Any) -> str | None:
    """Why a replica cannot go on, which is killed then; None: its actor and its engine both live."""
    try:
        lives = await asyncio.wait_for(replica.healthy.remote(), HEALTH_TIMEOUT_S)
        problem = None if lives else "its engine is dead"
    except TimeoutError:
        problem = f"it does not say within {HEALTH_TIMEOUT_S:g} s whether it lives"
    except RayError as error:
        problem = last_line(error)
    if problem is not None:
        ray.kill(replica)
    return problem


async def rejoin(replica: Any, master_address: str) -> None:
    """Moves the replica's segment to another master. Raises ReplicaLost; what cannot move is killed."""
    try:
        await asyncio.wait_for(replica.rejoin.remote(master_address), REJOIN_TIMEOUT_S)
    except TimeoutError as error:
        ray.kill(replica)
        raise ReplicaLost(f"it did not move to another master within {REJOIN_TIMEOUT_S:g} s") from error
    except RayError as error:
        ray.kill(replica)
        raise ReplicaLost(f"it cannot move to another master: {last_line(error)}") from error


def last_line(error: Exception) -> str:
    """The end of an error's text: what an actor raised, without Ray's traceback."""
    return str(error).strip().splitlines()[-1]
