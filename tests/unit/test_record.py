"""The run record: resuming, refusing, skipping, and what is written when a stage fails or is stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.errors import InputError
from draftline.recipe.schema import Recipe
from draftline.runs.frame import RunFrame
from draftline.runs.progress import Progress
from draftline.runs.record import open_run, read_record
from draftline.runs.states import STAGES, RunState, StageState
from draftline.runs.stopping import StopRequested
from draftline.storage.artifacts import RunFolder


def recipe(**changes: object) -> Recipe:
    values = {
        "run_id": "first",
        "target": {"path": "target"},
        "data": {"prompts": "prompts.jsonl"},
        "draft": {"tap_layers": [0, 1]},
    }
    return Recipe.model_validate(values | changes)


def run_all(store: Path, ran: list[str], *, fail_in: str = "", error: BaseException | None = None) -> None:
    with RunFrame.open(store, recipe(), Progress()) as frame, frame.running():
        for name in STAGES:
            with frame.stage(name) as stage:
                if stage.skipped:
                    continue
                ran.append(name)
                output = frame.folder.path / name / "out.txt"
                output.parent.mkdir(exist_ok=True)
                output.write_text(name)
                stage.made(output.parent)
                if name == fail_in and error is not None:
                    raise error


def test_a_whole_run_is_recorded(tmp_path: Path) -> None:
    ran: list[str] = []
    run_all(tmp_path, ran)
    record = read_record(RunFolder(tmp_path, "first"))
    assert ran == list(STAGES)
    assert record.state is RunState.DONE
    assert list(record.stages) == list(STAGES)
    assert list(record.stages["export"].outputs) == ["export/out.txt"]
    assert record.recipe == recipe().model_dump(mode="json")
    assert {"draftline", "ray", "torch"} <= set(record.versions)
    assert {f"time.{name}_s" for name in (*STAGES, "total")} <= set(record.figures)
    assert record.attempts[0].ended is not None
    assert (tmp_path / "first" / "recipe.yaml").read_text().startswith("run_id: first")


def test_done_stages_are_skipped_until_their_outputs_change(tmp_path: Path) -> None:
    run_all(tmp_path, [])
    again: list[str] = []
    run_all(tmp_path, again)
    assert again == []
    (tmp_path / "first" / "export" / "out.txt").write_text("tampered")
    run_all(tmp_path, again)
    assert again == ["export", "evaluate", "serve"]
    assert len(read_record(RunFolder(tmp_path, "first")).stages["export"].attempts) == 2


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("layer 3 is all zero"), "failed", "ValueError: layer 3 is all zero"),
        (StopRequested("SIGTERM"), "stopped", "stop requested (SIGTERM)"),
        (KeyboardInterrupt(), "stopped", "stop requested (KeyboardInterrupt)"),
    ],
)
def test_a_failed_or_stopped_run_is_resumed(tmp_path: Path, error: BaseException, state: str, reason: str) -> None:
    with pytest.raises(type(error)):
        run_all(tmp_path, [], fail_in="train", error=error)
    record = read_record(RunFolder(tmp_path, "first"))
    assert (record.state, record.stages["train"].state) == (state, state)
    assert record.stages["train"].attempts[0].reason == reason
    assert record.stages["export"].state is StageState.PENDING
    ran: list[str] = []
    run_all(tmp_path, ran)
    assert ran == list(STAGES[1:])


def test_a_run_whose_driver_was_killed_is_resumed(tmp_path: Path) -> None:
    program = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_record import recipe
from draftline.runs.frame import RunFrame
from draftline.runs.progress import Progress
with RunFrame.open(Path(sys.argv[1]), recipe(), Progress()) as frame, frame.running(), frame.stage("prepare"):
    os.kill(os.getpid(), 9)
"""
    tests = str(Path(__file__).parent)
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path), tests], check=False).returncode == -9
    record = read_record(RunFolder(tmp_path, "first"))
    assert (record.state, record.stages["prepare"].state) == ("running", "running")
    ran: list[str] = []
    run_all(tmp_path, ran)
    attempts = read_record(RunFolder(tmp_path, "first")).stages["prepare"].attempts
    assert ran == list(STAGES)
    assert [attempt.reason for attempt in attempts] == ["the driver ended without a word", None]


def test_another_recipe_is_refused_with_the_differences(tmp_path: Path) -> None:
    open_run(tmp_path, recipe())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"'first' exists with another recipe: seed: 0 -> 7"):
        open_run(tmp_path, recipe(seed=7))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    open_run(tmp_path, recipe(store="elsewhere"))  # how the store was written makes no difference


def test_two_drivers_never_share_a_run(tmp_path: Path) -> None:
    with (
        RunFrame.open(tmp_path, recipe(), Progress()),
        pytest.raises(InputError, match=rf"is being run by process {os.getpid()}"),
        RunFrame.open(tmp_path, recipe(), Progress()),
    ):
        pass


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "first")
    folder.path.mkdir()
    folder.record.write_text(json.dumps({"run_id": "first"}))
    with pytest.raises(InputError, match="is not a run record of this version"):
        read_record(folder)
