"""What a fault may cost a run: time without progress, and work that is done again. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.plan import Damage, Scenario, Victim, Way

RECOVERY_S = 10.0  # to notice a loss and to go on from it, beside the start of an engine

# Those that training waits for, and goes on with another one of.
_WAITED_FOR = {Victim.REPLICA, Victim.REPLICA_ENGINE, Victim.MASTER, Victim.MASTER_PROCESS}
# Those that training begins again without.
_TRAINING = {
    Victim.COMMAND,
    Victim.DRIVER,
    Victim.FEEDER,
    Victim.WORKER,
    Victim.TRAINING_DRIVER,
    Victim.TRAIN_CONTROLLER,
    Victim.BOARD,
}


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault as it came, and how far the run had come by then."""

    at: float  # time.monotonic()
    victim: Victim
    checkpointed: int  # the newest checkpoint's step; 0: there was none
    finished: Mapping[str, int]  # for each stage that was done: its attempts


def longest_pause(marks: Sequence[float], after: float) -> float:
    """The longest time between two marks, in order, of which the second comes after `after`; 0: there is none."""
    return max((later - sooner for sooner, later in itertools.pairwise(marks) if later > after), default=0.0)


def finished_stages(record: Mapping[str, Any]) -> dict[str, int]:
    """For each stage that a record says is done: how many attempts it took."""
    stages = record.get("stages", {})
    return {name: len(stage["attempts"]) for name, stage in stages.items() if stage["state"] == "done"}


def standstill_problems(
    scenario: Scenario, standstill_s: float | None, engine_start_s: float | None, pause_s: float
) -> list[str]:
    """Whether a lost replica, engine or master held the run up for no longer than another one takes to start.

    `pause_s` is the longest pause that an undisturbed run makes from that moment on. It comes on top: the fault may
    fall into it. Whole, not only what is left of it then, because two runs are not at the same point to the second.
    Two faults, and those that training begins again after, have no such limit: two recoveries overlap as they like,
    and worker groups and clusters take their own time to start.
    """
    single = scenario.way is Way.KILL and len(scenario.faults) == 1
    if not single or scenario.faults[0].victim not in _WAITED_FOR or standstill_s is None:
        return []  # a fault that never came is told of elsewhere
    if engine_start_s is None:
        return ["no engine was seen to start: the standstill cannot be judged"]
    allowed_s = engine_start_s + RECOVERY_S + pause_s
    if standstill_s <= allowed_s:
        return []
    return [
        f"no progress for {standstill_s:.1f} s, allowed {allowed_s:.1f} s: {engine_start_s:.1f} s that an engine takes "
        f"to start, {RECOVERY_S:.0f} s, and a pause of {pause_s:.1f} s that an undisturbed run makes"
    ]


def repetition_problems(
    record: Mapping[str, Any], scenario: Scenario, strikes: Sequence[Strike], checkpoint_every: int
) -> list[str]:
    """Whether a run that lost something did no more again than it must.

    Stages that were done by then are not tried again, unless their output was damaged. Training goes on from the newest
    checkpoint, or from the one before when that was damaged: at most one checkpoint interval is trained again.
    """
    problems = []
    first = {name: had for strike in reversed(strikes) for name, had in strike.finished.items()}
    for name, attempts in first.items():
        found = len(record["stages"][name]["attempts"])
        if found != attempts and not (name == "prepare" and scenario.damage is Damage.SAMPLES):
            problems.append(f"{name} was done after {attempts} attempt(s), and yet has {found}")
    reached = max((strike.checkpointed for strike in strikes if strike.victim in _TRAINING), default=0)
    if not reached or record["stages"]["train"]["state"] != "done":
        return problems
    figures = record["figures"]
    resumed, allowed = figures.get("train.resumed_from_step", 0), reached
    if scenario.damage is Damage.CHECKPOINT:
        allowed -= checkpoint_every
    over = reached + checkpoint_every >= figures["train.steps"]  # then training may have ended before the signal came
    if resumed < allowed and not (over and not resumed):
        problems.append(f"training went on from step {resumed}, although step {allowed} was checkpointed and whole")
    return problems
