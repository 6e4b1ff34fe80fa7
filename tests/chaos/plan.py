"""What is done to a run: a seed decides the stage, the victims and the moments. Pure: same seed, same plan.

Any 20 seeds in a row cover every victim, two requests to stop, one damaged output and one full disk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Victim(StrEnum):
    """A process of a run."""

    COMMAND = "command"  # `draftline run` itself
    DRIVER = "driver"  # the job's process
    REPLICA = "replica"
    REPLICA_ENGINE = "replica's engine process"
    MASTER = "master"  # the actor
    MASTER_PROCESS = "master process"
    FEEDER = "feeder"
    WORKER = "train worker"
    TRAINING_DRIVER = "training driver"
    TRAIN_CONTROLLER = "train controller"  # Ray Train's
    BOARD = "progress board"
    EXPORT_TASK = "export task"
    EVALUATION_ENGINE = "evaluation engine"
    EVALUATION_CORE = "evaluation engine's process"
    SERVE_REPLICA = "serve replica"


class Way(StrEnum):
    """How a run is disturbed."""

    NOTHING = "nothing"
    KILL = "SIGKILL"
    STOP = "SIGTERM"
    DAMAGE = "SIGKILL and a damaged file"
    FULL_DISK = "full disk"


class Damage(StrEnum):
    """Which output loses a bit between a killed driver and the next submission."""

    SAMPLES = "samples"
    CHECKPOINT = "newest checkpoint"


@dataclass(frozen=True, slots=True)
class Fault:
    """One signal to one process.

    The first one comes when `share` of the time is over that the victim lives in this stage of an undisturbed run; one
    that follows comes `after_s` seconds after the one before, or as soon as its victim lives. `pick` chooses among
    several victims of that kind. With a full disk no signal is sent: the victim only tells the time.
    """

    victim: Victim
    share: float = 0.0
    after_s: float = 0.0
    pick: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The run's size; `until` is its last stage, None: all of them."""

    replicas: int = 1
    workers: int = 1
    until: str | None = "export"
    epochs: int = 100


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to one run."""

    seed: int
    shape: Shape
    way: Way
    stage: str
    faults: tuple[Fault, ...]
    damage: Damage | None = None
    hold_s: float = 0.0  # how long a full disk stays full

    @property
    def ends_run(self) -> bool:
        """Whether whoever started the run has to submit it again."""
        gone = {Victim.COMMAND, Victim.DRIVER}
        return self.way is not Way.NOTHING and any(fault.victim in gone for fault in self.faults)

    def __str__(self) -> str:
        at = f"in {self.stage} at {self.faults[0].share:.0%}" if self.faults else ""
        if self.way is Way.FULL_DISK:
            return f"{self.way} for {self.hold_s:.0f} s {at}"
        victims = ", then ".join(fault.victim for fault in self.faults)
        return f"{self.way} {victims}{f' ({self.damage})' if self.damage else ''} {at}".rstrip()


@dataclass(frozen=True, slots=True)
class _Case:
    stage: str
    victims: tuple[tuple[Victim, ...], ...]  # one after the other, each one of several
    way: Way = Way.KILL
    replicas: int = 1
    workers: int = 1
    shares: tuple[float, float] = (0.05, 0.9)
    until: str | None = "export"


_V = Victim
_CASES = (
    _Case("train", ((_V.WORKER,),), shares=(0.5, 0.9)),
    _Case("prepare", ((_V.DRIVER,),), shares=(0.05, 0.6)),
    _Case("train", ((_V.MASTER_PROCESS,),)),
    _Case("train", ((_V.REPLICA,), (_V.MASTER_PROCESS,)), replicas=2, shares=(0.05, 0.7)),
    _Case("prepare", ((_V.REPLICA,),), shares=(0.05, 0.6)),
    _Case("train", ((_V.REPLICA_ENGINE,),)),
    _Case("train", ((_V.FEEDER,),)),
    _Case("train", ((_V.DRIVER,),), shares=(0.3, 0.9)),
    _Case("train", ((_V.WORKER,), (_V.FEEDER,)), workers=2, shares=(0.2, 0.8)),
    _Case("train", ((_V.COMMAND, _V.DRIVER),), way=Way.STOP),
    _Case("train", ((_V.DRIVER,),), way=Way.DAMAGE, shares=(0.75, 0.9)),
    _Case("train", ((_V.DRIVER,),), way=Way.FULL_DISK, shares=(0.4, 0.8)),
    _Case("train", ((_V.TRAINING_DRIVER,), (_V.REPLICA_ENGINE,)), shares=(0.05, 0.7)),
    _Case("train", ((_V.MASTER,),)),
    _Case("train", ((_V.BOARD,),)),
    _Case("prepare", ((_V.COMMAND, _V.DRIVER),), way=Way.STOP, shares=(0.05, 0.6)),
    _Case("export", ((_V.EXPORT_TASK,),), shares=(0.05, 0.6)),
    _Case("train", ((_V.TRAIN_CONTROLLER,),)),
    _Case("evaluate", ((_V.EVALUATION_ENGINE, _V.EVALUATION_CORE),), shares=(0.05, 0.6), until="evaluate"),
    _Case("serve", ((_V.SERVE_REPLICA,),), shares=(0.05, 0.6), until=None),
)
CYCLE = len(_CASES)


def scenario(seed: int) -> Scenario:
    """The plan of a seed. Raises ValueError for a negative one."""
    if seed < 0:
        raise ValueError(f"seed {seed} is negative; allowed: 0 and above")
    case, dice = _CASES[seed % CYCLE], random.Random(f"chaos/{seed}")
    victims = [dice.choice(choices) for choices in case.victims]
    share = dice.uniform(*case.shares)
    first = Fault(victims[0], share=share, pick=dice.randrange(100))
    later = (Fault(victim, after_s=dice.uniform(0.5, 8.0), pick=dice.randrange(100)) for victim in victims[1:])
    return Scenario(
        seed=seed,
        shape=Shape(case.replicas, case.workers, case.until),
        way=case.way,
        stage=case.stage,
        faults=(first, *later),
        damage=dice.choice(list(Damage)) if case.way is Way.DAMAGE else None,
        hold_s=dice.uniform(3.0, 15.0) if case.way is Way.FULL_DISK else 0.0,
    )


def undisturbed(shape: Shape) -> Scenario:
    """A run that nothing happens to."""
    return Scenario(-1, shape, Way.NOTHING, "", ())


def parse_seeds(text: str) -> list[int]:
    """Seeds from `0-19`, `3` or `0-4,7`. Raises ValueError, with what is allowed."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"seeds: found {text!r}; allowed: numbers and ranges, such as 0-19 or 3,7")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds:
        raise ValueError(f"seeds: {text!r} names none; allowed: numbers and ranges, such as 0-19 or 3,7")
    return seeds
