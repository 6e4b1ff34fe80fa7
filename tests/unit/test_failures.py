"""Which failure an exception is, and what a stage does about it."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import exceptions

from draftline.errors import BudgetSpent, InputError, RunFailed, one_line
from draftline.hidden_states.store import StatesLost
from draftline.recipe.schema import Recipe
from draftline.runs.attempts import run_stage
from draftline.runs.context import RunContext
from draftline.runs.failures import cause_of
from draftline.runs.frame import RunFrame, Stage
from draftline.runs.policy import Cause
from draftline.runs.progress import Progress
from draftline.runs.record import StoredRecord, read_record
from draftline.runs.stopping import StopRequested
from draftline.storage.local import LocalStore
from draftline.storage.store import DiskFull, StoreFailed
from draftline.training import failures as training_failures


class EngineDeadError(Exception):
    """Named as vLLM's."""


def in_a_task(error: Exception) -> exceptions.RayTaskError:
    return exceptions.RayTaskError("measure", "Traceback ...\nthe last line", error)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (exceptions.ActorDiedError(), Cause.ENGINE),
        (exceptions.WorkerCrashedError(), Cause.ENGINE),
        (in_a_task(EngineDeadError("gone")), Cause.ENGINE),
        (in_a_task(StatesLost("key", "not found")), Cause.MASTER),
        (StoreFailed("s3://b: refuses"), Cause.STORAGE),
        (in_a_task(OSError(errno.ENOSPC, "No space left on device", "/x")), Cause.DISK),
        (DiskFull("full"), Cause.DISK),
        (ValueError("a mistake"), None),
        (in_a_task(ValueError("a mistake")), None),
        (InputError("bad"), None),
        (RunFailed("a check did not hold"), None),
    ],
)
def test_losses_are_told_from_mistakes(error: Exception, cause: Cause | None) -> None:
    assert cause_of(error) is cause
    assert cause_of(_raised_from(error)) is cause


def _raised_from(error: Exception) -> Exception:
    try:
        raise RuntimeError("on the way") from error
    except RuntimeError as outer:
        return outer


def test_an_error_in_one_line() -> None:
    assert one_line(ValueError("first\nlast")) == "ValueError: last"
    assert one_line(in_a_task(ValueError("layer 3"))) == "ValueError: layer 3"


class Bodies:
    """A stage's body that fails with the given errors, one an attempt, and then makes its output."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.closed = 0

    def __call__(self, context: RunContext, stage: Stage) -> str:
        if self.errors:
            raise self.errors.pop(0)
        output = context.frame.folder.path / "out.txt"
        output.write_text("made")
        stage.made(output)
        return "made"

    def close(self) -> None:
        self.closed += 1


def attempt(store: Path, bodies: Bodies, **budgets: Any) -> Any:
    recipe = Recipe.model_validate(
        {
            "run_id": "first",
            "target": {"path": "target"},
            "data": {"prompts": "prompts.jsonl"},
            "draft": {"tap_layers": [0, 1]},
            "failures": {"pause_s": 0.0, **budgets},
        }
    )
    with RunFrame.open(LocalStore(store), recipe, Progress()) as frame, frame.running():
        try:
            return run_stage(cast(RunContext, SimpleNamespace(frame=frame, actors=bodies)), "prepare", bodies)
        finally:
            if not bodies.errors:
                raise StopRequested("the rest is not wanted")


def test_a_stage_is_tried_again_after_losses(tmp_path: Path) -> None:
    bodies = Bodies(exceptions.ActorDiedError(), StoreFailed("s3://b: slow down"))
    with pytest.raises(StopRequested):
        attempt(tmp_path, bodies)
    assert bodies.closed == 2
    record = read_record(LocalStore(tmp_path), "first").record
    assert record.stages["prepare"].state == "done"
    assert len(record.stages["prepare"].attempts) == 3
    assert [(event.stage, event.cause) for event in record.events] == [("prepare", "engine"), ("prepare", "storage")]


def test_mistakes_and_stops_are_not_tried_again(tmp_path: Path) -> None:
    for error in (ValueError("a mistake"), StopRequested("SIGTERM")):
        bodies = Bodies(error, ValueError("never reached"))
        with pytest.raises(type(error)):
            attempt(tmp_path, bodies)
        assert len(bodies.errors) == 1


def test_a_loss_that_was_judged_is_not_judged_again() -> None:
    try:
        raise BudgetSpent("replica lost; failures.replicas allows 0") from exceptions.ActorDiedError()
    except BudgetSpent as error:
        assert cause_of(error) is None
        assert training_failures.cause_of(error) == "stage"


def test_a_store_that_refuses_the_first_write_of_a_stage_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refusals = StoredRecord.write, [StoreFailed("s3://b: slow down")]

    def refusing(stored: StoredRecord) -> None:
        if refusals and stored.record.stages["prepare"].state == "running":
            raise refusals.pop()
        write(stored)

    monkeypatch.setattr(StoredRecord, "write", refusing)
    with pytest.raises(StopRequested):
        attempt(tmp_path, Bodies())
    record = read_record(LocalStore(tmp_path), "first").record
    assert record.stages["prepare"].state == "done"
    assert [(event.stage, event.cause) for event in record.events] == [("prepare", "storage")]


def test_a_disk_that_stays_full_ends_the_run_with_one_message(tmp_path: Path) -> None:
    full = [OSError(errno.ENOSPC, "No space left on device", "/store/x") for _ in range(3)]
    bodies = Bodies(*full, ValueError("never reached"))
    with pytest.raises(RunFailed, match=r"the disk is full: .*/store/x.*submit the same run_id again"):
        attempt(tmp_path, bodies, storage=2)
