"""The run record: resuming, refusing, skipping, and what is written when a stage fails or is stopped."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.cli import main
from draftline.errors import InputError
from draftline.recipe.schema import Recipe
from draftline.runs.frame import RunFrame
from draftline.runs.policy import Action, Cause
from draftline.runs.progress import Progress
from draftline.runs.record import RECORD_VERSION, RunRecord, RunTakenOver, open_run, read_record
from draftline.runs.states import STAGES, RunState, StageState
from draftline.runs.stopping import StopRequested
from draftline.storage.local import LocalStore
from draftline.storage.store import DiskFull, StoreFailed


def recipe(**changes: object) -> Recipe:
    values = {
        "run_id": "first",
        "target": {"path": "target"},
        "data": {"prompts": "prompts.jsonl"},
        "draft": {"tap_layers": [0, 1]},
    }
    return Recipe.model_validate(values | changes)


def record_in(store: Path) -> RunRecord:
    return read_record(LocalStore(store), "first").record


def run_all(store: Path, ran: list[str], *, fail_in: str = "", error: BaseException | None = None) -> None:
    with RunFrame.open(LocalStore(store), recipe(), Progress()) as frame, frame.running():
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
    record = record_in(tmp_path)
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
    assert len(record_in(tmp_path).stages["export"].attempts) == 2


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
    record = record_in(tmp_path)
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
from draftline.storage.local import LocalStore
from draftline.runs.frame import RunFrame
from draftline.runs.progress import Progress
store = LocalStore(Path(sys.argv[1]))
with RunFrame.open(store, recipe(), Progress()) as frame, frame.running(), frame.stage("prepare"):
    os.kill(os.getpid(), 9)
"""
    tests = str(Path(__file__).parent)
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path), tests], check=False).returncode == -9
    record = record_in(tmp_path)
    assert (record.state, record.stages["prepare"].state) == ("running", "running")
    ran: list[str] = []
    run_all(tmp_path, ran)
    attempts = record_in(tmp_path).stages["prepare"].attempts
    assert ran == list(STAGES)
    assert [attempt.reason for attempt in attempts] == ["the driver ended without a word", None]


def test_another_recipe_is_refused_with_the_differences(tmp_path: Path) -> None:
    open_run(LocalStore(tmp_path), recipe())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"'first' exists with another recipe: seed: 0 -> 7"):
        open_run(LocalStore(tmp_path), recipe(seed=7))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    open_run(LocalStore(tmp_path), recipe(store="elsewhere"))  # how the store was written makes no difference


def test_two_drivers_never_share_a_run(tmp_path: Path) -> None:
    with (
        RunFrame.open(LocalStore(tmp_path), recipe(), Progress()),
        pytest.raises(InputError, match=rf"is being run by process {os.getpid()}"),
        RunFrame.open(LocalStore(tmp_path), recipe(), Progress()),
    ):
        pass


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "record.json").write_text(json.dumps({"run_id": "first"}))
    with pytest.raises(InputError, match=r"first/record.json is not a run record of this version: recipe_sha256"):
        record_in(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "3"}, "version: "),
        ({"version": 3.0}, "found a record of version 3.0"),
        ({"version": 2.0}, "version: "),
        ({"run_id": "other"}, "it is that of the run 'other'"),
        ({"stages": {}}, "stages: found none; allowed: prepare, train, export, evaluate, serve"),
        ({"state": "running"}, "the run is running, but has no attempt"),
        ({"attempts": [{"started": "yesterday"}]}, "attempts.0.started: "),
        ({"attempts": [{"started": "2026-01-01T00:00:00"}]}, "attempts.0.started: .*a time with its zone"),
        ({"figures": {"time.total_s": "abc"}}, "figures.time.total_s: found abc; allowed: a number"),
        ({"figures": {"memory.peak_bytes": float("nan")}}, "figures.memory.peak_bytes: found nan"),
        (
            {"stages": {name: {"outputs": {"../../etc/passwd": "00"}} for name in STAGES}},
            "stages.prepare.outputs.*no key of the artifact store",
        ),
        ({"guarantee": "\ud800"}, "surrogates not allowed"),
        ([], "it holds no JSON object"),
    ],
)
def test_a_damaged_record_is_named_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict | list, message: str
) -> None:
    open_run(LocalStore(tmp_path), recipe())
    file = tmp_path / "first" / "record.json"
    damaged = json.dumps(json.loads(file.read_text()) | change if isinstance(change, dict) else change)
    file.write_text(damaged)
    with pytest.raises(InputError, match=f"first/record.json.*{message}"):
        open_run(LocalStore(tmp_path), recipe())
    assert file.read_text() == damaged
    assert main(["runs", "--store", str(tmp_path)]) == 0
    assert "its record cannot be read" in capsys.readouterr().out


def test_what_cannot_be_a_runs_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("record.json", ".lock"):
        (tmp_path / name / "first" / name).mkdir(parents=True)
        refused = pytest.raises((InputError, StoreFailed), match=rf"first/{re.escape(name)}: ")
        with refused, RunFrame.open(LocalStore(tmp_path / name), recipe(), Progress()):
            pass
        left = {path.name for path in (tmp_path / name / "first").iterdir()}
        assert left <= {name, ".lock"}


def test_a_record_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    open_run(LocalStore(tmp_path), recipe())
    file = tmp_path / "first" / "record.json"
    newer = file.read_text().replace(f'"version": {RECORD_VERSION}', f'"version": {RECORD_VERSION + 1}')
    file.write_text(newer)
    with pytest.raises(InputError, match=f"found a record of version {RECORD_VERSION + 1}; allowed: up to"):
        open_run(LocalStore(tmp_path), recipe())
    assert file.read_text() == newer


def test_a_driver_whose_run_was_taken_over_changes_nothing(tmp_path: Path) -> None:
    first = open_run(LocalStore(tmp_path), recipe())
    second = open_run(LocalStore(tmp_path), recipe())
    second.record.figures["prepare.samples"] = 1
    second.write()
    first.record.figures["prepare.samples"] = 2
    with pytest.raises(RunTakenOver, match=r"'first' in .* was taken over by another driver"):
        first.write()
    assert record_in(tmp_path).figures == {"prepare.samples": 1}


def test_an_older_record_lacks_what_is_new_and_is_resumed(tmp_path: Path) -> None:
    open_run(LocalStore(tmp_path), recipe())
    file = tmp_path / "first" / "record.json"
    values = json.loads(file.read_text())
    for name in ("version", "events", "events_by_cause", "guarantee"):
        del values[name]
    del values["recipe"]["failures"], values["recipe"]["extraction"]
    file.write_text(json.dumps(values))
    assert open_run(LocalStore(tmp_path), recipe()).record.events == []


def test_failures_are_decided_by_budget_and_recorded(tmp_path: Path) -> None:
    few = recipe(failures={"replicas": 1, "pause_s": 0.0})
    with RunFrame.open(LocalStore(tmp_path), few, Progress()) as frame, frame.running():
        with frame.stage("prepare"):
            assert frame.failed(Cause.REPLICA, "the engine died").action is Action.RECOVER
            assert frame.failed(Cause.REPLICA, "the engine died").action is Action.FAIL
        for name in STAGES[1:]:
            with frame.stage(name):
                pass
    events = record_in(tmp_path).events
    assert [(event.stage, event.cause, event.action) for event in events] == [
        ("prepare", "replica", "recover"),
        ("prepare", "replica", "fail"),
    ]
    assert "failures.replicas allows 1" in events[1].reason
    assert record_in(tmp_path).events_by_cause == {"replica": 2}


def test_a_record_that_cannot_be_written_does_not_hide_what_failed(tmp_path: Path) -> None:
    class Full(LocalStore):
        full = False

        def write_if(self, key: str, data: bytes, version: str | None) -> str:
            if self.full:
                raise DiskFull("the disk is full")
            return super().write_if(key, data, version)

    store = Full(tmp_path)
    with (
        pytest.raises(ValueError, match="layer 3"),
        RunFrame.open(store, recipe(), Progress()) as frame,
        frame.running(),
        frame.stage("prepare"),
    ):
        store.full = True
        raise ValueError("layer 3 is all zero")
    store.full = False
    run_all(tmp_path, [])
    assert record_in(tmp_path).events_by_cause == {"driver": 1}
