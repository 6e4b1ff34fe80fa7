"""The states of a stage and of a run, and the transitions between them. Pure: no clock, no files."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

STAGES = ("prepare", "train", "export", "evaluate", "serve")


class StageState(StrEnum):
    """Where a stage stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def terminal(self) -> bool:
        """Whether an attempt has ended in this state; only a new attempt leaves it."""
        return self in (StageState.DONE, StageState.FAILED, StageState.STOPPED)


class RunState(StrEnum):
    """Where a run stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def terminal(self) -> bool:
        """Whether the run has ended; resuming starts it again."""
        return self in (RunState.DONE, RunState.FAILED, RunState.STOPPED)


# A terminal stage may run again: after a failure or a stop, or because its outputs no longer verify. It becomes pending
# when a stage before it runs again. A running stage whose driver vanished is stopped by the driver that resumes.
_STAGE_TRANSITIONS = {
    StageState.PENDING: {StageState.RUNNING},
    StageState.RUNNING: {StageState.DONE, StageState.FAILED, StageState.STOPPED},
    StageState.DONE: {StageState.RUNNING, StageState.PENDING},
    StageState.FAILED: {StageState.RUNNING, StageState.PENDING},
    StageState.STOPPED: {StageState.RUNNING, StageState.PENDING},
}
_RUN_TRANSITIONS = {
    RunState.PENDING: {RunState.RUNNING},
    RunState.RUNNING: {RunState.DONE, RunState.FAILED, RunState.STOPPED},
    RunState.DONE: {RunState.RUNNING},
    RunState.FAILED: {RunState.RUNNING},
    RunState.STOPPED: {RunState.RUNNING},
}


class IllegalTransition(RuntimeError):
    """A step of the orchestrator that the state machine does not allow: a mistake in the orchestrator."""


def advance_stage(stages: Mapping[str, StageState], name: str, to: StageState) -> dict[str, StageState]:
    """All stages' states after stage `name` went to `to`.

    A stage starts only when all before it are done, and while no other runs; what comes after it becomes pending, since
    it was made from the older outputs. Raises IllegalTransition.
    """
    current = stages[name]
    if to not in _STAGE_TRANSITIONS[current]:
        raise IllegalTransition(f"stage {name} cannot go from {current} to {to}")
    changed = dict(stages)
    if to is StageState.RUNNING:
        position = STAGES.index(name)
        unfinished = [before for before in STAGES[:position] if stages[before] is not StageState.DONE]
        if unfinished:
            raise IllegalTransition(f"stage {name} cannot start before {', '.join(unfinished)}")
        running = [other for other in STAGES if stages[other] is StageState.RUNNING]
        if running:
            raise IllegalTransition(f"stage {name} cannot start while {running[0]} runs")
        changed.update({after: StageState.PENDING for after in STAGES[position + 1 :]})
    changed[name] = to
    return changed


def advance_run(current: RunState, to: RunState, stages: Mapping[str, StageState]) -> RunState:
    """`to`, when the run may go there. A run is done only when its stages are. Raises IllegalTransition."""
    if to not in _RUN_TRANSITIONS[current]:
        raise IllegalTransition(f"a run cannot go from {current} to {to}")
    if to is RunState.DONE and any(state is not StageState.DONE for state in stages.values()):
        raise IllegalTransition("a run is done only when every stage is")
    if to.terminal and StageState.RUNNING in stages.values():
        raise IllegalTransition("a run ends only after its running stage has")
    return to
