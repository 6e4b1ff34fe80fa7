"""Ends a training at once when starting its workers again cannot help; runs in Ray Train's controller."""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from draftline.training.failures import is_final, origin


class FailFast(UserCallback):
    """Raises what the workers raised, which Ray Train's controller does not try again."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """See `failures.is_final`; everything else is left to Ray Train's own failure policy."""
        for error in worker_exceptions.values():
            if is_final(error):
                raise origin(error)
