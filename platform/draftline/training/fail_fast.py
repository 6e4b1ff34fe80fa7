"""What follows when train workers fail; runs in Ray Train's controller."""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from draftline.errors import one_line
from draftline.training.failures import is_final, origin


class FailFast(UserCallback):
    """Ends a training at once when starting its workers again cannot help; tells `board`, if any, of other losses.

    The board is the handle of an actor with `lost(str)`.
    """

    def __init__(self, board: Any = None) -> None:
        self._board = board

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raises what no new start can mend, which the controller does not try again (see `failures.is_final`).

        Everything else is left to Ray Train's own failure policy. It is told from here because whoever waits for the
        training learns nothing of the losses that Ray Train recovers from.
        """
        for error in worker_exceptions.values():
            if is_final(error):
                raise origin(error)
        if self._board is not None and worker_exceptions:
            rank, error = min(worker_exceptions.items(), key=lambda item: item[0])
            self._board.lost.remote(f"train worker {rank}: {one_line(origin(error))}")
