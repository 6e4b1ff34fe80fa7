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


def allowed_standstill_s(scenario: Scenario, engine_start_s: float, pause_s: float) -> float | None:
    """How long a lost replica, engine or master may hold a run up: as long as another engine takes to start, and a bit.

    `engine_start_s` is from an engine's process to it being up, `pause_s` the longest pause that an undisturbed run
    makes from that moment on. The pause comes on top, as the fault may fall into it: whole, not only what is left of it
    then, because two runs are not at the same point to the second.

    None: no limit. Two faults, and those that training begins again after, have none: two recoveries overlap as they
    like, and worker groups and clusters take their own time to start.
    """
    single = scenario.way is Way.KILL and len(scenario.faults) == 1
    if not single or scenario.faults[0].victim not in _WAITED_FOR:
        return None
    return engine_start_s + RECOVERY_S + pause_s


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
        if name == "serve":
            continue  # it leaves nothing that could be verified, so it always runs again
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
