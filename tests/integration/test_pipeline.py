"""The whole pipeline on the tiny target, by its command, all its artifacts in S3: stopped in the middle, resumed as on
another machine, finished, reported."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from draftline.runs.record import RunRecord, require_record
from draftline.storage.store import ArtifactStore, open_store
from leftovers import abandoned_segments, family, listening, wait_for
from s3_server import BUCKET, SECRET_KEY, s3_environment, s3_server

RECIPE = """
run_id: tiny
store: s3://{bucket}/drafts
target: {{path: {target}}}
data:
  prompts: prompts.jsonl
  held_out_share: 0.2
  answer: {{max_tokens: 24}}
draft: {{layers: 1, tap_layers: [0, 1], block_size: 4, vocab_size: 128, markov_rank: 8}}
hidden_states: {{window_bytes: 1MiB, segment_bytes: 16MiB, buffer_bytes: 16MiB}}
training: {{workers: 2, epochs: 40, row_tokens: 128, evaluate_every_steps: 40, checkpoint_every_steps: 5}}
evaluation: {{prompts_per_domain: 2, max_tokens: 24}}
serving: {{port: 0, max_model_len: 256, confidence_cut: 0.1}}
"""
FIGURES = [
    *(f"train.{name}" for name in ("eal_start", "eal_held_out", "data_wait_share")),
    *(f"evaluate.{name}" for name in ("acceptance_length", "estimate_acceptance_length", "identical_share")),
    *(f"time.{name}_s" for name in ("total", "prepare", "train", "export", "evaluate", "serve")),
    *("evaluate.speedup_batch1", "serve.http_ok", "memory.peak_bytes"),
]


def draftline(folder: Path, log: Path, *arguments: str, cache: str = "cache") -> subprocess.Popen[bytes]:
    """The command; `cache` is where the machine that it runs on would keep its working folders."""
    command = [sys.executable, "-m", "draftline.cli", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["DRAFTLINE_CACHE"] = str(folder / cache)
    with log.open("w") as out:
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)


def finished(process: subprocess.Popen[bytes], limit_s: float) -> int:
    try:
        return process.wait(limit_s)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    domains = {"sums": "What is {0} plus {0}?", "words": "Say the word {0} twice."}
    lines = [
        json.dumps({"prompt": text.format(number), "domain": domain})
        for domain, text in domains.items()
        for number in range(10, 22)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(target=tiny_target, bucket=BUCKET))
    with s3_server(tmp_path) as endpoint:
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
        yield tmp_path


def stored() -> ArtifactStore:
    return open_store(f"s3://{BUCKET}/drafts")


def record() -> RunRecord:
    return require_record(stored(), "tiny")


@pytest.mark.timeout(600)
def test_a_run_is_stopped_resumed_and_reported(folder: Path) -> None:
    shared_before = abandoned_segments()
    log = folder / "first.txt"
    run = draftline(folder, log, "run", "recipe.yaml", "--no-wait")
    try:
        wait_for(log, "[train] step ", limit_s=200)
        processes = family(run.pid)
        ports = {port for port, pid in listening() if pid in processes}
        run.send_signal(signal.SIGTERM)
        assert finished(run, 90) == 130, log.read_text()
    finally:
        run.kill()
    said = log.read_text()
    assert "checkpoint of step " in said
    assert record().state == "stopped"
    saved = max(key for key in stored().keys("tiny/checkpoints") if key.endswith("manifest.json"))
    step = int(saved.split("step-")[1].split("/")[0])
    assert f"checkpoint of step {step} is written" in said
    assert not [pid for pid in processes if psutil.pid_exists(pid)]
    assert not ports & {port for port, _ in listening()}
    assert not abandoned_segments() - shared_before

    log = folder / "second.txt"
    second = draftline(folder, log, "run", "recipe.yaml", "--no-wait", cache="another-machine")
    assert finished(second, 400) == 0, log.read_text()
    said = log.read_text()
    assert "== prepare: done before, outputs verified" in said
    assert "capture check passed" in said
    assert "curl http://127.0.0.1:" in said
    assert "where the time went" in said
    assert not abandoned_segments() - shared_before

    shown = subprocess.run(
        [sys.executable, "-m", "draftline.cli", "report", "tiny", "--json", "--store", stored().url],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    report = json.loads(shown.stdout)
    assert (report["run_id"], report["state"]) == ("tiny", "done")
    figures = report["figures"]
    assert not [name for name in FIGURES if name not in figures]
    assert figures["train.resumed_from_step"] == step
    assert figures["train.eal_held_out"] > figures["train.eal_start"]
    assert figures["evaluate.identical_share"] == 1.0
    assert figures["evaluate.estimate_gap"] <= 0.02
    assert figures["serve.http_ok"] is True
    assert figures["train.window_peak_bytes"] <= 1 << 20
    kept = stored().keys("tiny")
    assert {f"tiny/draft/{name}" for name in ("config.json", "manifest.json", "model.safetensors")} <= set(kept)
    assert {"tiny/samples/samples.parquet", "tiny/report/training.json", "tiny/report/evaluation.json"} <= set(kept)
    assert SECRET_KEY not in said + (folder / "first.txt").read_text() + record().model_dump_json()

    log = folder / "third.txt"
    other = draftline(folder, log, "run", "recipe.yaml", "--no-wait", "--set", "training.epochs=3")
    assert finished(other, 90) == 2
    assert "training.epochs: 40 -> 3" in log.read_text()
