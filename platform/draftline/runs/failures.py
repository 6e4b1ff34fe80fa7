"""Which failure an exception is: the loss of a part that can be had again, or what trying again would not mend.

Imports neither torch nor vLLM: their exceptions arrive by name.
"""

from __future__ import annotations

import errno
import os

from draftline.errors import BudgetSpent, chain
from draftline.runs.policy import Cause

_ENGINE_DEATHS = {"EngineDeadError", "EngineGenerateError"}


def cause_of(error: BaseException) -> Cause | None:
    """The cause that a failure policy knows; None: not a loss (a failed check, bad input, a mistake), or
    one that was judged already."""
    from ray import exceptions

    from draftline.hidden_states.store import StatesLost, StoreUnavailable
    from draftline.storage.store import DiskFull, StoreFailed

    if any(isinstance(each, BudgetSpent) for each in chain(error)):
        return None
    lost = (
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.OutOfMemoryError,
        exceptions.LocalRayletDiedError,
    )
    for each in chain(error):
        if isinstance(each, DiskFull) or is_disk_full(each):
            return Cause.DISK
        if isinstance(each, StoreFailed):
            return Cause.STORAGE
        if isinstance(each, StatesLost | StoreUnavailable):
            return Cause.MASTER
        if isinstance(each, lost) or type(each).__name__ in _ENGINE_DEATHS:
            return Cause.ENGINE
    return None


def is_disk_full(error: BaseException) -> bool:
    """True for an error that says that the disk or the quota is full.

    Of an error that came out of a compiled library or another process, often only the text is left.
    """
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or any(os.strerror(n) in str(error) for n in full)
