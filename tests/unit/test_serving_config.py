"""A Serve config is strict, and becomes engine arguments that are known to work."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from draftline.errors import InputError
from draftline.recipe.schema import Recipe
from draftline.serving.app import losses
from draftline.serving.config import (
    ServeConfig,
    check_draft_fits,
    complete,
    engine_kwargs,
    max_draft_tokens,
    parse_serve_config,
)
from draftline.serving.port import hold_port
from draftline.serving.probe import ServeUnanswered, ask, curl_line, list_models, proxy_answers

ROOT = Path(__file__).parents[2]
TARGET = {"hidden_size": 64, "vocab_size": 272, "num_hidden_layers": 2}
DRAFT = {
    "speculators_model_type": "dspark",
    "block_size": 4,
    "sample_from_anchor": True,
    "aux_hidden_state_layer_ids": [0, 1],
    "transformer_layer_config": {"hidden_size": 64, "vocab_size": 272},
}


def config(**changes: Any) -> ServeConfig:
    return ServeConfig(**({"model_name": "tiny", "target": "/models/tiny", "draft": "/models/draft"} | changes))


def test_cpu_engine_uses_the_plugin_and_cuts_drafts() -> None:
    args = engine_kwargs(config(draft_tokens=4, confidence_cut=0.25))
    assert args["dtype"] == "float32" and args["enforce_eager"]
    assert args["worker_cls"] == "draftline.vllm_plugin.worker.DSparkCPUWorker"
    assert args["additional_config"] == {"draftline": {"confidence_cut": 0.25}}
    assert args["async_scheduling"] is False
    assert args["speculative_config"] == {"method": "dspark", "model": "/models/draft", "num_speculative_tokens": 4}
    assert "model" not in args  # ray.serve.llm refuses it


def test_gpu_engine_uses_vllms_own_dspark() -> None:
    args = engine_kwargs(
        config(
            accelerator="gpu",
            draft_tokens=8,
            draft_sampling="probabilistic",
            rejection_method="block",
            speculative_args={"enable_adaptive_verification": True},
            engine_args={"gpu_memory_utilization": 0.8},
        )
    )
    assert not {"worker_cls", "additional_config", "enforce_eager"} & args.keys()
    assert args["gpu_memory_utilization"] == 0.8
    assert args["speculative_config"] == {
        "method": "dspark",
        "model": "/models/draft",
        "num_speculative_tokens": 8,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "enable_adaptive_verification": True,
    }


def test_target_alone_has_no_draft_arguments() -> None:
    assert not {"speculative_config", "worker_cls"} & engine_kwargs(config(draft=None)).keys()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine_args": {"max_model_len": 9}}, "max_model_len"),
        ({"engine_args": {"speculative_config": {}}}, "speculative_config"),
        ({"draft": None, "draft_tokens": 3}, "draft"),
        ({"replica": 2}, "replica"),
        ({"threads": "2"}, "threads"),
        ({"confidence_cut": 1.5}, "confidence_cut"),
        ({"model_name": "a b"}, "model_name"),
        (
            {
                "speculative_args": {"num_speculative_tokens_per_batch_size": {"1": 8}},
                "engine_args": {"data_parallel_size": 2},
            },
            "data_parallel_size",
        ),
    ],
)
def test_bad_fields_are_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        config(**changes)


def test_command_line_texts_become_values() -> None:
    values = {"model_name": "7", "target": "t", "draft": "d", "draft_tokens": "4", "confidence_cut": "0.3", "port": "0"}
    parsed = parse_serve_config(values)
    assert (parsed.model_name, parsed.draft_tokens, parsed.confidence_cut, parsed.port) == ("7", 4, 0.3, 0)
    assert parse_serve_config(values | {"confidence_cut": "auto"}).confidence_cut == "auto"
    with pytest.raises(InputError, match="draft_tokens"):
        parse_serve_config(values | {"draft_tokens": "many"})


def test_shipped_serve_file_parses() -> None:
    text = yaml.safe_load((ROOT / "serve" / "quickstart.yaml").read_text())
    for application in text["applications"]:
        parsed = parse_serve_config(application["args"])
        assert parsed.model_name == application["name"]
        assert application["import_path"] == "draftline.serving.app:build"
    assert text["http_options"] == {"host": parsed.host, "port": parsed.port}


def test_recipe_becomes_a_config() -> None:
    recipe = Recipe.model_validate(
        {
            "run_id": "r",
            "target": {"path": "t", "dtype": "float32"},
            "data": {"prompts": "p.jsonl"},
            "draft": {"tap_layers": [0, 1], "block_size": 4, "block_layout": "one_plus_n"},
            "serving": {"port": 0, "max_requests": 2},
        }
    )
    made = ServeConfig.from_recipe(recipe, target=Path("/t"), target_name="tiny", draft=Path("/d"))
    assert (made.model_name, made.draft_tokens, made.dtype, made.max_requests) == ("tiny", 3, "float32", 2)
    assert ServeConfig.from_recipe(recipe, target="/t", target_name="tiny", draft=None).draft_tokens is None


def test_application_and_url() -> None:
    made = config(model_name="owner/name", host="0.0.0.0", port=8123, route_prefix="/pair")
    assert (made.application, made.url) == ("owner--name", "http://127.0.0.1:8123/pair")
    assert config().url == "http://127.0.0.1:8000"


def test_fitting_draft_passes() -> None:
    check_draft_fits(TARGET, DRAFT, 4)
    check_draft_fits({"text_config": TARGET}, DRAFT, 1)
    assert max_draft_tokens(DRAFT) == 4
    assert max_draft_tokens(DRAFT | {"sample_from_anchor": False}) == 3


@pytest.mark.parametrize(
    ("change", "tokens", "message"),
    [
        ({}, 5, "draft_tokens is 5, allowed are 1 to 4"),
        ({"sample_from_anchor": False}, 4, "allowed are 1 to 3"),
        ({"sample_from_anchor": None}, 4, "sample_from_anchor"),
        ({"speculators_model_type": "eagle3"}, 4, "'eagle3'"),
        ({"transformer_layer_config": {"hidden_size": 32, "vocab_size": 272}}, 4, "hidden_size is 32"),
        ({"transformer_layer_config": {"hidden_size": 64, "vocab_size": 8}}, 4, "vocab_size is 8"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, 4, "layers 0 to 1"),
    ],
)
def test_draft_that_would_serve_wrongly_is_refused(change: dict, tokens: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_draft_fits(TARGET, DRAFT | change, tokens)


def test_complete_fills_in_draft_tokens_and_names_missing_files(tmp_path: Path) -> None:
    for name, content in (("target", TARGET), ("draft", DRAFT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    made = config(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    assert complete(made).draft_tokens == 4
    with pytest.raises(InputError, match="nowhere"):
        complete(made.model_copy(update={"draft": str(tmp_path / "nowhere")}))
    with pytest.raises(InputError, match=r"serving.target: no file .*nowhere"):
        complete(made.model_copy(update={"target": str(tmp_path / "nowhere")}))
    hub = complete(made.model_copy(update={"target": "owner/name"}))
    assert hub.target == "owner/name" and hub.draft_tokens == 4
    (tmp_path / "draft" / "config.json").write_text("{\n,")
    with pytest.raises(InputError, match="line 2"):
        complete(made)


def test_port_in_use_is_refused_by_number() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)), hold_port("127.0.0.1", port):
            pass
    with hold_port("127.0.0.1", 0) as port:
        assert port > 0
        with pytest.raises(InputError), hold_port("127.0.0.1", port):
            pass
    with hold_port("127.0.0.1", port):
        pass


def test_foreign_address_is_refused() -> None:
    with pytest.raises(InputError, match="no address of this machine"), hold_port("192.0.2.1", 0):
        pass


def test_probe_says_what_did_not_answer() -> None:
    with hold_port("127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ServeUnanswered, match=r"timed out .*0\.2 s"):
            ask(url, "tiny", "hello", timeout_s=0.2)
    with pytest.raises(ServeUnanswered, match=rf"{port}.*refused"):
        list_models(url, timeout_s=2)
    assert not proxy_answers(url)


def test_curl_line_survives_the_shell() -> None:
    line = curl_line("http://127.0.0.1:8000", "tiny", "what's 2+2?", max_tokens=5)
    assert "http://127.0.0.1:8000/v1/chat/completions" in line
    body = json.loads(shlex.split(line)[-1])
    assert body["messages"][0]["content"] == "what's 2+2?" and body["max_tokens"] == 5


def test_a_starting_application_s_losses_are_told_once_each() -> None:
    failed = "A replica failed to start with exception. Retrying {} more time(s). Error:\nTraceback\nThe actor died."
    slow = "Deployment 'LLM' has 1 replicas that have taken more than 30s to initialize."

    def application(**messages: str) -> Any:
        return SimpleNamespace(deployments={name: SimpleNamespace(message=text) for name, text in messages.items()})

    first = losses(application(LLM=failed.format(2), Ingress=""))
    assert first == {
        "LLM: A replica failed to start with exception. Retrying 2 more time(s). Error: ... The actor died."
    }
    assert losses(application(LLM=failed.format(1))).isdisjoint(first)
    assert not losses(application(LLM=slow)) and not losses(None)
