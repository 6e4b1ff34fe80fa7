"""The Serve application with real parts: Ray Serve, vLLM on CPU, the tiny target and a DSpark draft for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from draftline.errors import InputError
from draftline.serving.app import Served, deploy, remove
from draftline.serving.config import ServeConfig
from draftline.serving.probe import ServeUnanswered, ask, chat, list_models, proxy_answers
from tiny import build_tiny_draft

BLOCK = 4
QUESTION = "How many apples are in the basket?"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    draft = build_tiny_draft(tiny_target, tmp_path_factory.mktemp("serve") / "draft", block_size=BLOCK, draft_vocab=128)
    return ServeConfig(
        model_name="tiny",
        target=str(tiny_target),
        draft=str(draft),
        confidence_cut=0.0,
        threads=1,
        max_model_len=256,
        max_requests=2,
        port=0,
        engine_args={"per_request_spec_decode_metrics": "summary"},
    )


@pytest.fixture(scope="module")
def served(cluster: None, config: ServeConfig) -> Iterator[tuple[Served, list[str]]]:
    lines: list[str] = []
    running = deploy(config, timeout_s=240, progress=lines.append)
    yield running, lines
    remove(running.name)


def test_refusals_come_before_anything_starts(cluster: None, config: ServeConfig, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)):
            deploy(config.model_copy(update={"port": port}))
    with pytest.raises(InputError, match="draft_tokens is 5, allowed are 1 to 4"):
        deploy(config.model_copy(update={"draft_tokens": 5}))
    assert not serve.status().proxies


def test_answers_over_http(served: tuple[Served, list[str]]) -> None:
    running, lines = served
    assert list_models(running.url) == ["tiny"]
    first = ask(running.url, "tiny", QUESTION, max_tokens=24)
    assert first and first == ask(running.url, "tiny", QUESTION, max_tokens=24)
    assert first != ask(running.url, "tiny", "Another question.", max_tokens=24)
    assert any("waiting for" in line or "building" in line for line in lines)


def test_decodes_with_the_draft(served: tuple[Served, list[str]]) -> None:
    drafts = chat(served[0].url, "tiny", QUESTION, max_tokens=24)["metrics"]["speculative_decoding"]
    assert drafts["num_spec_tokens"] == BLOCK
    assert drafts["num_draft_tokens"] == BLOCK * drafts["num_spec_steps"] > 0


def test_unknown_model_is_an_http_error(served: tuple[Served, list[str]]) -> None:
    with pytest.raises(ServeUnanswered, match="404"):
        ask(served[0].url, "another", QUESTION)


def test_second_port_is_refused_while_serve_runs(served: tuple[Served, list[str]], config: ServeConfig) -> None:
    with pytest.raises(InputError, match="one cluster serves on one port"):
        deploy(config.model_copy(update={"port": 1}))


def test_removal_frees_the_port(served: tuple[Served, list[str]]) -> None:
    running, _ = served
    remove(running.name)
    assert not proxy_answers(running.url)
    assert not serve.status().applications
    remove(running.name)
