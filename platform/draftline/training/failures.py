"""What ended a training: the part that was lost, told from the error that came out of it. Imports no torch."""

from __future__ import annotations

from typing import Literal

from draftline.errors import BudgetSpent, RunFailed, chain

Lost = Literal["workers", "feeder", "master", "store", "stage"]

# Ray Train's own words for workers that died or never came up, and torch's for a rank that no longer answers.
_WORKER_DEATHS = {
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "PreemptionError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
}
_GLOO = "gloo/transport"  # in what gloo raises, a plain RuntimeError, when another rank has died
_S3 = "AWS Error"  # in the OSError that pyarrow makes of S3's refusals, where Ray Train keeps its own state
_ORDER: tuple[Lost, ...] = ("feeder", "store", "master", "workers")


class FeederGone(RunFailed):
    """The feeder's actor is dead or cannot be reached: a new one is needed, and a new start of the train workers."""


class TrainingFailed(RunFailed):
    """A training ended without a result; `lost` is the part that it lost, `problem` what that part said last."""

    def __init__(self, lost: Lost, problem: str) -> None:
        super().__init__(lost, problem)
        self.lost = lost
        self.problem = problem

    def __str__(self) -> str:
        return f"training failed ({self.lost}): {self.problem}"


def cause_of(error: BaseException) -> Lost:
    """The part whose loss ended the training; `stage` when none was lost (a mistake, bad input, a check
    that failed), or when the loss was judged already.

    When several ranks failed, the loss that explains the others counts: without a feeder all ranks end, and one rank
    that dies takes its neighbours' connections along.
    """
    if any(isinstance(each, BudgetSpent) for each in chain(error)):
        return "stage"
    found = {lost for each in chain(error) if (lost := _lost(each)) is not None}
    return next((lost for lost in _ORDER if lost in found), "stage")


def origin(error: BaseException) -> BaseException:
    """The error that `cause_of` judged by; the innermost one where no part was lost."""
    lost, errors = cause_of(error), list(chain(error))
    return next((each for each in errors if _lost(each) == lost), errors[-1])


def is_final(error: BaseException) -> bool:
    """True when starting the train workers again cannot help: other parts must come first, or nothing helps."""
    return cause_of(error) in ("feeder", "store", "master") or any(isinstance(e, RunFailed) for e in chain(error))


def _lost(error: BaseException) -> Lost | None:
    from ray import exceptions

    from draftline.hidden_states.store import StoreUnavailable
    from draftline.storage.store import DiskFull, StoreFailed

    if isinstance(error, TrainingFailed):
        return None if error.lost == "stage" else error.lost
    if isinstance(error, FeederGone):
        return "feeder"
    if isinstance(error, StoreFailed | DiskFull) or (isinstance(error, OSError) and _S3 in str(error)):
        return "store"
    if isinstance(error, StoreUnavailable):
        return "master"
    if isinstance(error, exceptions.RayActorError | exceptions.WorkerCrashedError | exceptions.NodeDiedError):
        return "workers"
    if isinstance(error, exceptions.OutOfMemoryError) or type(error).__name__ in _WORKER_DEATHS:
        return "workers"
    return "workers" if isinstance(error, RuntimeError) and _GLOO in str(error) else None
