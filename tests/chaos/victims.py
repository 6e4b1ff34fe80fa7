"""Finds a run's processes by what they are called, from outside, and ends them without warning."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from chaos.plan import Victim

# Ray calls a worker's process after its actor's class (while it is made, also after the actor's own name), or after the
# task that it runs.
_TITLES = {
    Victim.COMMAND: r"\S*python\S* -m draftline\.cli run ",
    Victim.DRIVER: r"\S*python\S* \S*jobs/pipeline\.py ",
    Victim.REPLICA: r"ray::(.*:)?TargetReplica\b",
    Victim.MASTER: r"ray::(.*:)?MooncakeMaster\b",
    Victim.MASTER_PROCESS: r"\S*mooncake_master ",
    Victim.FEEDER: r"ray::(.*:)?Feeder\b",
    Victim.WORKER: r"ray::(.*:)?RayTrainWorker\b",
    Victim.TRAINING_DRIVER: r"ray::(.*:)?_TrainingDriver\b",
    Victim.TRAIN_CONTROLLER: r"ray::(.*:)?TrainController\b",
    Victim.BOARD: r"ray::(.*:)?_ProgressBoard\b",
    Victim.EXPORT_TASK: r"ray::run_export\b",
    Victim.EVALUATION_ENGINE: r"ray::(.*:)?MeasuredEngine\b",
    Victim.SERVE_REPLICA: r"ray::(.*:)?ServeReplica:\S*LLMServer",
}
_ENGINE = r"VLLM::"  # vLLM's own processes: the core below the actor, the workers below the core
_ENGINES = {Victim.REPLICA: Victim.REPLICA_ENGINE, Victim.EVALUATION_ENGINE: Victim.EVALUATION_CORE}


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it looked when it was seen."""

    pid: int
    parent: int
    title: str


def look(pid: int) -> list[Seen]:
    """The process and all below it; those that end meanwhile are left out."""
    seen = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                seen.append(Seen(process.pid, process.ppid(), " ".join(process.cmdline())))
    return seen


def by_role(family: Iterable[Seen]) -> dict[Victim, list[int]]:
    """Which processes may be whose victim: process ids by role, in order. Pure."""
    family = list(family)
    roles: dict[int, Victim] = {}
    for process in family:
        for victim, title in _TITLES.items():
            if re.match(title, process.title):
                roles[process.pid] = victim
    parents = {process.pid: process.parent for process in family}
    for process in family:
        if re.match(_ENGINE, process.title):
            owner = next((roles[pid] for pid in _ancestors(process.pid, parents) if roles.get(pid) in _ENGINES), None)
            if owner is not None:
                roles[process.pid] = _ENGINES[owner]
    found: dict[Victim, list[int]] = {}
    for pid, victim in sorted(roles.items()):
        found.setdefault(victim, []).append(pid)
    return found


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) in parents:
        yield pid


def strike(pid: int, number: signal.Signals) -> bool:
    """Sends the signal; False when the process has ended by itself."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def end_all(pids: Iterable[int]) -> None:
    """Ends what should not be there any more, so that the next run is not disturbed by it."""
    pids = list(pids)
    for pid in pids:
        strike(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5.0)
