"""One run, from its first submission to the last: does what a scenario says, and checks what must hold."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos import invariants
from chaos.disk import FullDisk
from chaos.plan import Fault, Scenario, Victim, Way
from chaos.recovery import Strike, allowed_standstill_s, finished_stages, longest_pause, repetition_problems
from chaos.victims import end_all, strike
from chaos.watch import POLL_S, Life, Watch, Watched, submit
from draftline.recipe.load import load_recipe
from leftovers import abandoned_segments, listening, survivors

MOST_SUBMISSIONS = 4
END_S = 60.0  # a run that is asked to end does so within this time
DISK_BYTES = 64 << 20
_FULL = re.compile(r"the run failed: .*(the disk is full|the disk or the quota is full)")
_LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Reference:
    """What an undisturbed run gave, and when its processes lived."""

    weights: Mapping[str, str]
    lives: Mapping[tuple[str, Victim], Life]
    steps: Sequence[tuple[float, int]]  # of checkpoints: seconds into training, step
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of progress in each stage: seconds into it

    def pause_s(self, stage: str, fault: Fault) -> float:
        """The longest time without progress that ends after a first fault is due."""
        life = self.lives[stage, fault.victim]
        return longest_pause(self.marks[stage], life.first_s + fault.share * (life.last_s - life.first_s))

    def moment(self, stage: str, fault: Fault) -> tuple[float, int]:
        """When a first fault is due: seconds after its victim was first seen in the stage, step that is checkpointed.

        Training goes faster at one time than at another, so what falls among its steps is told by the step.
        """
        life = self.lives[stage, fault.victim]
        later_s = fault.share * (life.last_s - life.first_s)
        done = [step for seconds, step in self.steps if seconds <= life.first_s + later_s]
        return (0.0, done[-1]) if stage == "train" and done else (later_s, 0)


@dataclass(slots=True)
class Outcome:
    """What became of one run; no problems: all that must hold did."""

    scenario: Scenario
    folder: Path
    seconds: float = 0.0
    submissions: int = 0
    standstill_s: float | None = None  # the longest time without progress, from the first signal to that stage's end
    allowed_s: float | None = None  # how long that may be; None: there is no limit
    engine_start_s: float | None = None  # the longest, from a target replica's process to it being up
    weights: Mapping[str, str] = field(default_factory=dict)
    lives: Mapping[tuple[str, Victim], Life] = field(default_factory=dict)
    steps: Sequence[tuple[float, int]] = ()
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    other_weights: bool = False
    lost: int = 0
    repeated: int = 0
    hung: bool = False
    skipped: str | None = None  # why it could not be tried here
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether the run did what it must."""
        return not self.problems

    def line(self) -> str:
        """One line for people."""
        what = "undisturbed" if self.scenario.way is Way.NOTHING else f"seed {self.scenario.seed:>3}  {self.scenario}"
        if self.skipped:
            return f"{what}: skipped: {self.skipped}"
        recovery = "" if self.standstill_s is None else f", longest standstill {self.standstill_s:.0f} s"
        recovery += "" if self.allowed_s is None else f" (allowed {self.allowed_s:.0f} s)"
        engine = "" if self.engine_start_s is None else f", engine start {self.engine_start_s:.0f} s"
        verdict = "ok" if self.good else "FAILED: " + "; ".join(self.problems)
        return f"{what}: {self.seconds:.0f} s in {self.submissions} submission(s){recovery}{engine}: {verdict}"


class Experiment:
    """Carries out one scenario in a folder that holds `recipe.yaml`; the store is `runs` in it.

    `reference` says what the weights must be and when the first fault is due; without one it comes with the first
    checkpoint. A submission that takes longer than `limit_s` hangs.
    """

    def __init__(self, folder: Path, scenario: Scenario, reference: Reference | None, limit_s: float) -> None:
        self._folder, self._scenario, self._reference, self._limit_s = folder, scenario, reference, limit_s
        self._recipe = load_recipe(folder / "recipe.yaml", [])
        self._run = folder / "runs" / self._recipe.run_id
        self._watch = Watch(self._run)
        self._struck: list[Strike] = []
        self._disk: FullDisk | None = None
        self._outcome = Outcome(scenario, folder)

    def carry_out(self) -> Outcome:
        """Runs to the end, whatever that is; what does not hold is in the outcome's problems."""
        outcome = self._outcome
        if self._scenario.way is Way.FULL_DISK:
            self._disk = FullDisk(self._folder / "runs", DISK_BYTES)
            if self._disk.refused:
                outcome.skipped = self._disk.refused
                return outcome
        before = set(survivors(set()))
        segments = abandoned_segments()
        began = time.monotonic()
        try:
            self._submit_until_done()
            outcome.seconds = time.monotonic() - began
            self._check_leftovers(before, segments)
            self._check_outputs()
        finally:
            end_all(survivors(before))
            if self._disk is not None:
                if outcome.problems:
                    shutil.copytree(self._run, self._folder / "run")  # the disk goes with all that is on it
                self._disk.close()
        return outcome

    def _submit_until_done(self) -> None:
        outcome, until = self._outcome, self._scenario.shape.until
        arguments = ("--until", until) if until else ()
        for number in range(1, MOST_SUBMISSIONS + 1):
            outcome.submissions = number
            log = self._folder / f"log-{number}.txt"
            struck = len(self._struck)
            status = self._follow(submit(self._folder, log, *arguments), log)
            if status == 0 or outcome.hung:
                break
            if problem := self._unexpected(status, log, self._scenario.faults[struck : len(self._struck)]):
                self._say(problem, log)
                return
            if self._scenario.damage is not None:
                invariants.flip_a_byte(self._run, self._scenario.damage)
            self._watch.next_submission()
        else:
            self._say(f"not done after {MOST_SUBMISSIONS} submissions", log)
        missed = self._scenario.faults[len(self._struck) :]
        outcome.problems += [f"missed: no {fault.victim} lived when its moment came" for fault in missed]

    def _follow(self, process: subprocess.Popen[bytes], log: Path) -> int | None:
        """Watches a submission to its end, and strikes when it is time; its exit status, None when it hung."""
        deadline = time.monotonic() + self._limit_s
        while process.poll() is None:
            seen = self._watch.look(process, log)
            if (fault := self._due(seen)) is not None:
                self._strike(fault, seen)
            self._keep_disk_full()
            if time.monotonic() > deadline:
                self._outcome.hung = True
                self._say(f"hung: it did not end within {self._limit_s:.0f} s", log)
                self._end(process)
                return None
            time.sleep(POLL_S)
        return process.returncode

    def _due(self, seen: Watched) -> Fault | None:
        """The fault whose time has come and whose victim lives."""
        number = len(self._struck)
        if number >= len(self._scenario.faults):
            return None
        fault = self._scenario.faults[number]
        if not seen.roles.get(fault.victim):
            return None
        if number:
            return fault if seen.at - self._struck[-1].at >= fault.after_s else None
        stage = self._scenario.stage
        if seen.stage != stage:
            return None
        if self._reference is None:
            return fault if self._watch.checkpointed() else None
        later_s, step = self._reference.moment(stage, fault)
        lived_s = seen.stage_s - self._watch.lives[stage, fault.victim].first_s
        return fault if lived_s >= later_s and self._watch.checkpointed() >= step else None

    def _strike(self, fault: Fault, seen: Watched) -> None:
        victims, way = seen.roles[fault.victim], self._scenario.way
        number = signal.SIGTERM if way is Way.STOP else signal.SIGKILL
        checkpointed, finished = self._watch.checkpointed(), finished_stages(self._watch.record())
        if way is Way.FULL_DISK or strike(victims[fault.pick % len(victims)], number):
            self._struck.append(Strike(time.monotonic(), fault.victim, checkpointed, finished))

    def _keep_disk_full(self) -> None:
        if self._disk is None or not self._struck:
            return
        if time.monotonic() - self._struck[0].at < self._scenario.hold_s:
            self._disk.fill()
        else:
            self._disk.free()

    def _unexpected(self, status: int | None, log: Path, struck: tuple[Fault, ...]) -> str | None:
        """Why whoever started the run would not just submit it again after this exit status; None: they would."""
        if self._scenario.way is Way.STOP:
            return None if status == 130 and struck else f"exit status {status} instead of 130 after a request to stop"
        if self._scenario.way is Way.FULL_DISK:
            told = _FULL.search(log.read_text()) and struck
            return None if status == 1 and told else f"exit status {status}, and no word of a full disk"
        if any(fault.victim is Victim.DRIVER for fault in struck):
            return None
        return f"exit status {status}, although nothing but parts of the run were lost"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _check_leftovers(self, before: set[int], segments: set[str]) -> None:
        problems = self._outcome.problems
        problems += [f"still runs: {title} ({pid})" for pid, title in survivors(before).items()]
        if ports := self._watch.ports & listening():
            problems.append(f"ports still listened to: {sorted(port for port, _ in ports)}")
        if left := abandoned_segments() - segments:
            problems.append(f"abandoned in shared memory: {sorted(left)}")

    def _check_outputs(self) -> None:
        outcome, scenario, watch = self._outcome, self._scenario, self._watch
        outcome.lives, outcome.steps = watch.lives, watch.steps
        outcome.engine_start_s = max(watch.engine_starts, default=None)
        if scenario.way is Way.NOTHING:
            outcome.marks = {stage: watch.marks_within(stage) for stage in watch.last_seen}
        record = watch.record()
        outcome.problems += invariants.record_problems(record, scenario)
        outcome.problems += repetition_problems(
            record, scenario, self._struck, self._recipe.training.checkpoint_every_steps
        )
        if self._struck and scenario.stage in watch.last_seen:
            outcome.standstill_s = watch.standstill(self._struck[0].at, watch.last_seen[scenario.stage])
            self._check_standstill(outcome.standstill_s)
        if record["stages"]["train"]["state"] != "done":
            return  # the exit status has told of it: there are no weights to look at
        outcome.problems += invariants.budget_problems(record, self._recipe, self._watch.store_bytes)
        used = invariants.trajectory(self._run, self._recipe)
        outcome.lost, outcome.repeated = used.lost, used.repeated
        outcome.problems += used.problems[:3]
        outcome.weights = invariants.weights(self._run)
        outcome.other_weights = self._reference is not None and outcome.weights != self._reference.weights
        if self._reference is not None and outcome.other_weights:
            outcome.problems.append(f"other weights: {outcome.weights}, undisturbed {self._reference.weights}")

    def _check_standstill(self, standstill_s: float) -> None:
        outcome, scenario, reference = self._outcome, self._scenario, self._reference
        if reference is None or allowed_standstill_s(scenario, 0.0, 0.0) is None:
            return
        if outcome.engine_start_s is None:
            outcome.problems.append("no target replica was seen to come up")
            return
        pause_s = reference.pause_s(scenario.stage, scenario.faults[0])
        outcome.allowed_s = allowed_standstill_s(scenario, outcome.engine_start_s, pause_s)
        if outcome.allowed_s is not None and standstill_s > outcome.allowed_s:
            outcome.problems.append(f"no progress for {standstill_s:.1f} s, allowed {outcome.allowed_s:.1f} s")

    def _say(self, problem: str, log: Path) -> None:
        tail = log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
        self._outcome.problems.append("\n    ".join([f"{problem}; its log ends:", *tail]))
