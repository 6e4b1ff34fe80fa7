"""One stage, tried until it is done or its failures are used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftline.errors import RunFailed, one_line
from draftline.runs.context import RunContext
from draftline.runs.failures import cause_of
from draftline.runs.frame import Stage
from draftline.runs.policy import Action, Cause
from draftline.runs.stopping import StopRequested, stop_behind


class EndedEarly(StopRequested):
    """The run was asked to end after a stage."""


def run_stage(context: RunContext, name: str, body: Callable[[RunContext, Stage], Any], *, again: bool = False) -> Any:
    """Runs a stage unless it is done; returns what its body returns.

    A loss that the stage did not deal with itself (an engine, a task, the master, the artifact store, the disk) ends
    the attempt; as long as the failure policy allows it, all actors are started anew and the stage is tried again.
    Raises what the body raises, RunFailed for a disk that stays full.
    """
    frame = context.frame
    while True:
        try:
            with frame.stage(name, again=again) as stage:
                return None if stage.skipped else body(context, stage)
        except Exception as error:
            cause = None if stop_behind(error) else cause_of(error)
            if cause is None:
                raise
            if frame.failed(cause, one_line(error), name).action is Action.FAIL:
                if cause is Cause.DISK:
                    raise RunFailed(
                        f"the disk is full: {one_line(error)}. Make room and submit the same run_id again: it goes on "
                        "from what is stored, which is whole"
                    ) from error
                raise
            context.actors.close()
