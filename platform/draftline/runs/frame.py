"""The frame that stages run in: it moves the run record through the states, times stages and skips what is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from draftline.errors import BudgetSpent, InputError
from draftline.recipe.schema import Recipe
from draftline.runs.policy import Action, Cause, Decision, FailurePolicy
from draftline.runs.progress import Progress
from draftline.runs.record import Attempt, Event, Figure, RunRecord, StageRecord, StoredRecord, now, open_run
from draftline.runs.states import RunState, StageState, advance_run, advance_stage
from draftline.runs.stopping import stop_behind
from draftline.storage.artifacts import RunFolder
from draftline.storage.store import ArtifactStore, DiskFull, StoreFailed
from draftline.storage.workspace import Workspace, working_folder

EVENT_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a run is to end: `wait` serves until it is stopped, `leave` leaves the application up, `end` removes it.

    `until` ends it after that stage; it can be resumed.
    """

    serve: Literal["wait", "leave", "end"] = "leave"
    until: str | None = None


@dataclass(slots=True)
class Stage:
    """One attempt at a stage, handed to the body of `RunFrame.stage`."""

    name: str
    workspace: Workspace
    skipped: bool = False
    _outputs: list[Path] = field(default_factory=list)
    _stored: dict[str, str] = field(default_factory=dict)

    def made(self, *paths: Path) -> None:
        """Names the stage's outputs, files or folders of the run's folder: published, their checksums recorded."""
        self._outputs.extend(paths)

    def made_in_store(self, below: str) -> None:
        """Names outputs that whoever made them, perhaps on another machine, has published below a folder's name."""
        workspace = self.workspace
        names = workspace.names(below)
        self._stored.update({name: workspace.store.sha256(f"{workspace.prefix}/{name}") for name in names})

    def publish(self) -> dict[str, str]:
        """Sends the outputs to the artifact store; returns the sha256 of all, by name."""
        return self._stored | self.workspace.publish(*self._outputs)


@dataclass(slots=True)
class RunFrame:
    """A run's folder, record and progress, and the transitions between its states.

    with RunFrame.open(store, recipe, progress) as frame, frame.running():
        with frame.stage("prepare") as stage:
            if not stage.skipped:
                ...
                stage.made(frame.folder.samples)
                frame.figures({"prepare.samples": 480})
    """

    workspace: Workspace
    stored: StoredRecord
    policy: FailurePolicy
    progress: Progress
    _lock: IO[str]

    @property
    def folder(self) -> RunFolder:
        """The run's files on this machine."""
        return RunFolder(self.workspace.folder)

    @property
    def record(self) -> RunRecord:
        """The run record."""
        return self.stored.record

    @classmethod
    @contextlib.contextmanager
    def open(cls, store: ArtifactStore, recipe: Recipe, progress: Progress) -> Iterator[RunFrame]:
        """Opens a new run or resumes one, and keeps other processes off it.

        Raises InputError when the run_id exists with another recipe or another process is running it.
        """
        folder = working_folder(store, recipe.run_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / ".lock").open("a+")
        except OSError as error:
            raise InputError(
                f"{folder / '.lock'}: cannot be opened ({error.strerror}); allowed: a file that this user can write"
            ) from error
        with file as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise InputError(
                    f"run {recipe.run_id!r} in {store.url} is being run by process {lock.read().strip() or '?'}; "
                    "stop that one first, or give this recipe another run_id"
                ) from error
            stored = open_run(store, recipe)  # nothing of a run is read or written without its lock
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            workspace = Workspace(store, recipe.run_id, folder)
            yield cls(workspace, stored, FailurePolicy(recipe.failures), progress, lock)

    def figures(self, values: Mapping[str, Figure]) -> None:
        """Adds figures (dotted names) to the record and writes it."""
        self.record.figures.update(values)
        self._write()

    def guarantee(self, held: str) -> None:
        """Records what holds for the weights, were the run repeated."""
        self.record.guarantee = held
        self._write()

    def failed(self, cause: Cause, what: str, stage: str = "") -> Decision:
        """Something was lost: decides what follows, records and says it, and waits as long as was decided.

        `stage` is the one that the loss ended; when empty, the one that runs.
        """
        decision = self.policy.decide(cause, time.monotonic())
        self.note(cause, what, decision.action, decision.reason, stage)
        if decision.action is Action.RECOVER:
            time.sleep(decision.pause_s)
        return decision

    def recover(self, cause: Cause, what: str) -> None:
        """As `failed`, for a loss that is dealt with inside the stage that runs. Raises BudgetSpent."""
        decision = self.failed(cause, what)
        if decision.action is Action.FAIL:
            raise BudgetSpent(f"{what}; {decision.reason}")

    def note(self, cause: Cause, what: str, action: str, reason: str, stage: str = "") -> None:
        """Records and says something that was dealt with; `stage` as for `failed`."""
        self.progress.say(f"{cause}: {what} -> {action} ({reason})")
        running = (name for name, kept in self.record.stages.items() if kept.state is StageState.RUNNING)
        stage = stage or next(running, "")
        self.record.add_event(
            Event(time=now(), stage=stage, cause=cause, what=what[:EVENT_CHARACTERS], action=action, reason=reason)
        )
        self._write_if_possible()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The run is running in the block; then done, failed or stopped. Sets `time.total_s`, all attempts together.

        Waiting for a user after the last stage belongs outside.
        """
        self._close_what_a_vanished_driver_left()
        self._go(RunState.RUNNING)
        self.record.attempts.append(Attempt(started=now()))
        self._write()
        try:
            yield
        except BaseException as error:
            self._end_run(*_outcome(error))
            self._write_if_possible()
            raise
        self._end_run("done", None)
        self._write()

    @contextlib.contextmanager
    def stage(self, name: str, *, again: bool = False) -> Iterator[Stage]:
        """One attempt at stage `name`; `stage.skipped` says that it is done and its outputs verify.

        `again` runs it even so (serving leaves nothing behind that could be verified). An error or a stop ends the
        attempt, is recorded and goes on. Sets `time.<stage>_s`, all attempts together.
        """
        kept = self.record.stages[name]
        if kept.state is StageState.DONE and not again:
            damaged = self.workspace.fetch(kept.outputs)
            if not damaged:
                self.progress.stage(name, "done before, outputs verified")
                yield Stage(name, self.workspace, skipped=True)
                return
            self.progress.say(f"stage {name} runs again: {', '.join(damaged[:3])} missing or changed")
        self._move(name, StageState.RUNNING)
        kept.attempts.append(Attempt(started=now()))
        stage = Stage(name, self.workspace)
        try:
            self._write()
            self.progress.stage(name)
            yield stage
            kept.outputs = stage.publish()
        except BaseException as error:
            self._end_stage(name, *_outcome(error))
            self._write_if_possible()
            raise
        self._end_stage(name, "done", None)
        self._write()

    def _end_stage(self, name: str, state: str, reason: str | None) -> None:
        kept = self.record.stages[name]
        kept.attempts[-1] = kept.attempts[-1].model_copy(update={"ended": now(), "reason": reason})
        self.record.figures[f"time.{name}_s"] = _seconds(kept.attempts)
        self._move(name, StageState(state))

    def _end_run(self, state: str, reason: str | None) -> None:
        attempts = self.record.attempts
        attempts[-1] = attempts[-1].model_copy(update={"ended": now(), "reason": reason})
        self.record.figures["time.total_s"] = _seconds(attempts)
        self._go(RunState(state))

    def _close_what_a_vanished_driver_left(self) -> None:
        reason = "the driver ended without a word"
        for name, kept in self.record.stages.items():
            if kept.state is StageState.RUNNING:
                self.note(Cause.DRIVER, f"{reason} in stage {name}", Action.RECOVER, "the run was submitted again")
                self._move(name, StageState.STOPPED)
                _close(kept.attempts, reason)
        if self.record.state is RunState.RUNNING:
            self._go(RunState.STOPPED)
            _close(self.record.attempts, reason)

    def _move(self, name: str, to: StageState) -> None:
        for stage, state in advance_stage(self.record.states(), name, to).items():
            if state is StageState.PENDING and self.record.stages[stage].state is not StageState.PENDING:
                self.record.stages[stage] = StageRecord(attempts=self.record.stages[stage].attempts)
            self.record.stages[stage].state = state

    def _go(self, to: RunState) -> None:
        self.record.state = advance_run(self.record.state, to, self.record.states())

    def _write(self) -> None:
        self.stored.write()

    def _write_if_possible(self) -> None:
        """Where something has failed already: a record that cannot be written must not hide that.

        What is missing from it is seen by whoever resumes: the stage still counts as running.
        """
        try:
            self.stored.write()
        except (DiskFull, StoreFailed, OSError) as error:
            self.progress.say(f"the run record could not be written: {error}")


def _outcome(error: BaseException) -> tuple[str, str]:
    """The state that `error` ends an attempt in, and the reason for the record."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped", f"stop requested ({type(error).__name__})"
    if stop := stop_behind(error):
        return "stopped", f"stop requested ({stop})"
    cause = getattr(error, "cause", None) or error  # an actor's error brings its whole traceback as its text
    return "failed", f"{type(cause).__name__}: {cause}"


def _seconds(attempts: list[Attempt]) -> float:
    return round(sum(attempt.seconds for attempt in attempts), 3)


def _close(attempts: list[Attempt], reason: str) -> None:
    # Nobody knows when it ended, so it counts as no time at all rather than as the time until now.
    attempts[-1] = attempts[-1].model_copy(update={"ended": attempts[-1].started, "reason": reason})
