"""Watches one submission of a run from outside: its stages, its progress, its processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.plan import Victim
from chaos.recovery import longest_pause
from chaos.victims import Seen, by_role, look
from leftovers import listening

POLL_S = 0.2
SLOW_POLL_S = 1.0  # for what costs more than a look
# Lines about steps and captures are no marks of progress: they come up to 5 s after what they tell of, and would halve
# a pause that falls before them. Checkpoints, which come every few steps, are seen at once.
_PROGRESS = re.compile(r"^\[(\w+)\] (sample|prompt) (\d+)", re.MULTILINE)
_ENGINES_UP = re.compile(r"^\[\w+\] \d+ target replica\(s\) up ", re.MULTILINE)
_METRICS_PORT = re.compile(r"mooncake_master .*-metrics_port=(\d+)")
_ALLOCATED = re.compile(r"^master_allocated_bytes (\S+)", re.MULTILINE)
# Whatever of these appears in the run's folder is work that was done.
_WORK = ("samples/**/*.parquet", "checkpoints/*/manifest.json", "draft/manifest.json", "report/*.json")


@dataclass(slots=True)
class Life:
    """When a kind of process lived within a stage, seconds after the stage began."""

    first_s: float
    last_s: float


@dataclass(slots=True)
class Watched:
    """One look at a run."""

    at: float  # time.monotonic()
    stage: str | None  # that runs now
    stage_s: float  # since it was first seen to run
    roles: dict[Victim, list[int]]
    family: list[Seen]


@dataclass(slots=True)
class Watch:
    """All that was seen of a run, over all its submissions."""

    run: Path
    lives: dict[tuple[str, Victim], Life] = field(default_factory=dict)
    marks: list[float] = field(default_factory=list)  # when progress was seen
    engine_starts: list[float] = field(default_factory=list)  # seconds from a target replica's process to it being up
    steps: list[tuple[float, int]] = field(default_factory=list)  # of checkpoints: seconds into training, step
    last_seen: dict[str, float] = field(default_factory=dict)  # when each stage was last seen to run
    ports: set[tuple[int, int | None]] = field(default_factory=set)  # listened to, and by which process
    store_bytes: int = 0  # the most that the hidden states' store held during training, as its master says
    _began: dict[str, float] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _starting: dict[int, float | None] = field(default_factory=dict)  # replicas' processes: since when; None: it is up
    _said: int = 0
    _asked_at: float = 0.0

    def look(self, process: subprocess.Popen[bytes], log: Path) -> Watched:
        """Looks once and notes what it saw."""
        now = time.monotonic()
        stage = self._stage()
        family = look(process.pid)
        roles = by_role(family)
        stage_s = 0.0
        if stage is not None:
            stage_s = now - self._began.setdefault(stage, now)
            self.last_seen[stage] = now
            for victim in roles:
                self.lives.setdefault((stage, victim), Life(stage_s, stage_s)).last_s = stage_s
            if stage == "train" and (step := self.checkpointed()) > (self.steps[-1][1] if self.steps else 0):
                self.steps.append((stage_s, step))
        said = self._fresh(log)
        if self._progressed(said):
            self.marks.append(now)
        self._note_engines(roles.get(Victim.REPLICA, []), bool(_ENGINES_UP.search(said)), now)
        if now - self._asked_at >= SLOW_POLL_S:
            self._asked_at = now
            self._note_ports(family)
            if stage == "train":
                self.store_bytes = max(self.store_bytes, *(_held_bytes(each.title) for each in family))
        return Watched(now, stage, stage_s, roles, family)

    def next_submission(self) -> None:
        """The run is submitted again: its stages begin again, with a new log."""
        self._began.clear()
        self._said = 0

    def record(self) -> dict[str, Any]:
        """The run record; empty before there is one."""
        file = self.run / "record.json"
        with contextlib.suppress(FileNotFoundError):
            record: dict[str, Any] = json.loads(file.read_text())
            return record
        return {}

    def checkpointed(self) -> int:
        """The newest checkpoint's step; 0: there is none yet."""
        with contextlib.suppress(FileNotFoundError):  # of a folder that goes while it is listed
            found = [file.parent.name for file in (self.run / "checkpoints").glob("step-*/manifest.json")]
            return max((int(name.removeprefix("step-")) for name in found), default=0)
        return 0

    def standstill(self, since: float, until: float) -> float:
        """The longest time without progress between two moments."""
        marks = [since, *(mark for mark in self.marks if since < mark < until), until]
        return longest_pause(marks, since)

    def marks_within(self, stage: str) -> list[float]:
        """When the stage of the newest submission began, made progress and ended: seconds after it began."""
        began, ended = self._began[stage], self.last_seen[stage]
        return [0.0, *(mark - began for mark in self.marks if began < mark < ended), ended - began]

    def _note_engines(self, pids: list[int], up: bool, now: float) -> None:
        for pid in pids:
            self._starting.setdefault(pid, now)
        since = [began for pid in pids if (began := self._starting[pid]) is not None]
        if up and since:
            self.engine_starts.append(now - min(since))
            self._starting.update(dict.fromkeys(pids))

    def _note_ports(self, family: list[Seen]) -> None:
        pids = {process.pid for process in family}
        self.ports |= {(port, pid) for port, pid in listening() if pid in pids}

    def _stage(self) -> str | None:
        stages = self.record().get("stages", {})
        return next((name for name, stage in stages.items() if stage["state"] == "running"), None)

    def _fresh(self, log: Path) -> str:
        text = log.read_text(errors="replace")
        fresh, self._said = text[self._said :], len(text)
        return fresh

    def _progressed(self, said: str) -> bool:
        # A count that is only said again is no progress, nor is one of nothing.
        counts = {" ".join(found) for found in _PROGRESS.findall(said) if found[-1] != "0"}
        new = (counts | _work(self.run)) - self._done
        self._done |= new
        return bool(new)


def _held_bytes(title: str) -> int:
    """What a Mooncake master has allocated, if the process is one and answers."""
    port = _METRICS_PORT.search(title)
    if port is None:
        return 0
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=0.5) as answer:
            found = _ALLOCATED.search(answer.read().decode())
    except OSError:  # it is being started or ended
        return 0
    return int(float(found[1])) if found else 0


def _work(run: Path) -> set[str]:
    """Each version of each file that means work was done."""
    found = set()
    for pattern in _WORK:
        with contextlib.suppress(FileNotFoundError):  # folders that go while they are listed
            for file in list(run.glob(pattern)):
                found.add(f"{file} {file.stat().st_mtime_ns}")
    return found


def submit(folder: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts `draftline run recipe.yaml`, as a user would, in a folder; output to `log`."""
    command = [sys.executable, "-m", "draftline.cli", "run", "recipe.yaml", "--no-wait", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as out:
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)
