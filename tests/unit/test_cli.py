"""The command line: exit statuses, messages, and what it prints."""

import json
from pathlib import Path

import pytest

from draftline import __version__
from draftline.cli import main
from draftline.recipe.load import load_recipe
from draftline.runs.frame import RunFrame
from draftline.runs.job import main as job_main
from draftline.runs.progress import Progress
from draftline.runs.states import STAGES
from draftline.storage import s3_client
from draftline.storage.local import LocalStore

RECIPE = """\
run_id: first
target: {path: target}
data: {prompts: prompts.jsonl}
draft: {tap_layers: [0, 1]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a recipe in it, as working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "What is {n}?"}}\n' for n in range(20)))
    return tmp_path


def make_run(store: Path) -> None:
    with RunFrame.open(LocalStore(store), load_recipe(Path("recipe.yaml")), Progress()) as frame, frame.running():
        for name in STAGES:
            with frame.stage(name):
                frame.figures({"train.eal_held_out": 1.75, "memory.peak_bytes": 3 << 30, "serve.http_ok": True})


@pytest.mark.parametrize("command", [["run"], ["recipe"]])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.yaml"], "absent.yaml"),
        (["recipe.yaml", "--set", "training.epoch=2"], "training.epochs"),
        (["recipe.yaml", "--set", "hidden_states.window_bytes=much"], "hidden_states.window_bytes"),
        (["recipe.yaml", "--set", "data.prompts=absent.jsonl"], "absent.jsonl"),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str], arguments: list[str], message: str
) -> None:
    assert main([*command, *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("draftline: ")
    assert "Traceback" not in said.err
    assert said.out == ""
    assert sorted((path.name for path in here.iterdir()), reverse=True) == ["recipe.yaml", "prompts.jsonl"]


def test_the_job_gives_the_same_status(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job_main(["recipe.yaml", "--set", "training.epoch=2"]) == 2
    assert "training.epochs" in capsys.readouterr().err
    assert sorted((path.name for path in here.iterdir()), reverse=True) == ["recipe.yaml", "prompts.jsonl"]


def test_recipe_prints_what_loads_to_the_same_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "recipe.yaml", "--set", "seed=7"]) == 0
    (here / "resolved.yaml").write_text(capsys.readouterr().out)
    assert load_recipe(here / "resolved.yaml") == load_recipe(here / "recipe.yaml", ["seed=7"])


def test_report_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "runs")
    capsys.readouterr()
    assert main(["report", "first", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["run_id", "state", "guarantee", "failures", "figures"]
    assert (report["run_id"], report["state"]) == ("first", "done")
    assert report["figures"]["train.eal_held_out"] == 1.75
    assert {f"time.{name}_s" for name in (*STAGES, "total")} <= set(report["figures"])


def test_report_and_runs_for_people(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "elsewhere")
    capsys.readouterr()
    assert main(["report", "first", "--store", "elsewhere"]) == 0
    report = capsys.readouterr().out
    assert "run first: done" in report
    assert "memory.peak_bytes   3.00 GiB" in report
    assert "where the time went" in report
    assert main(["runs", "--store", "elsewhere"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["first", "done"]


def test_an_unknown_run_names_the_store_and_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "runs")
    assert main(["report", "frist"]) == 2
    assert f"there is no run 'frist' in the store {here / 'runs'}; runs there: first" in capsys.readouterr().err
    assert main(["runs", "--store", "nowhere"]) == 2
    assert f"there is no store {here / 'nowhere'}" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["", "..", "a/b", "x" * 2000, "a\0b", "A B"])
def test_what_is_no_run_id_is_no_run(here: Path, capsys: pytest.CaptureFixture[str], run: str) -> None:
    assert main(["report", run]) == 2
    assert "there is no run " in capsys.readouterr().err


@pytest.mark.parametrize("address", ["http://user:hidden@h:1", "h:hidden", "hidden://x", "http://h:1/?token=hidden"])
def test_an_address_is_refused_and_not_repeated(
    here: Path, capsys: pytest.CaptureFixture[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "recipe.yaml", "--address", address]) == 2
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["run", "recipe.yaml"]) == 2
    said = capsys.readouterr().err
    assert "--address: found an address" in said and "RAY_ADDRESS: found" in said and "hidden" not in said


def test_no_cluster_at_an_address(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "recipe.yaml", "--address", "http://127.0.0.1:1/hidden"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("draftline: http://127.0.0.1:1: found no Ray cluster there") and "hidden" not in said


def test_a_store_that_cannot_be_reached_is_said_soon(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "_HASTY_S", 0.2)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for command in (["runs"], ["report", "first"]):
        assert main([*command, "--store", "s3://bucket/x"]) == 2
        assert "draftline: --store: s3://bucket/x" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"draftline {__version__}\n"
