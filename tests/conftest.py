"""What all tests share: the environment of a CPU machine, and one tiny target for the whole session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests say `from tiny import ...`

os.environ.update(
    RAY_AUTH_MODE="disabled",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="2",
    TOKENIZERS_PARALLELISM="false",
)

from tiny import build_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target (2 layers, hidden 64, byte-level tokenizer)."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny") / "target")
