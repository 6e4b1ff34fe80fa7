"""The one module that changes vLLM itself. It knows one version and leaves any other alone."""

from __future__ import annotations

import time
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.logger import init_logger

SUPPORTED_VERSION = "0.32."
REFUSAL = "dspark speculative decoding"
POLL_S = 1e-4

# Below "vllm" so that vLLM's logging configuration covers it.
logger = init_logger("vllm.draftline")

_applied = False


def apply() -> None:
    """Lift the V1 runner's refusal of DSpark, reserve cache slots for whole draft blocks, and poll without spinning.

    Once per process.

    With another vLLM version nothing is changed and an error is logged: vLLM then refuses DSpark by itself, and every
    other use of vLLM in this environment goes on working.
    """
    global _applied
    if _applied:
        return
    if not vllm_version.startswith(SUPPORTED_VERSION):
        logger.error(
            "draftline's DSpark for CPU knows vLLM %s*, found %s: DSpark drafts cannot be used on this machine",
            SUPPORTED_VERSION,
            vllm_version,
        )
        return
    _lift_refusal()
    _reserve_whole_blocks()
    _poll_without_spinning()
    _applied = True


def applied() -> bool:
    """Whether this process's vLLM accepts DSpark on CPU."""
    return _applied


def _lift_refusal() -> None:
    refused = VllmConfig._get_v1_model_runner_unsupported_features

    def refused_but_dspark(self: VllmConfig) -> list[str]:
        return [feature for feature in refused(self) if feature != REFUSAL]

    VllmConfig._get_v1_model_runner_unsupported_features = refused_but_dspark  # type: ignore[method-assign]


def _reserve_whole_blocks() -> None:
    """The proposer runs the whole block however few of its tokens are wanted, so it writes a block of cache slots."""
    reserved: Any = VllmConfig.num_lookahead_tokens  # a property, read through its class

    def num_lookahead_tokens(self: VllmConfig) -> int:
        config = self.speculative_config
        if config is None or not config.use_dspark():
            return reserved.fget(self)
        return max(reserved.fget(self), config.draft_model_config.hf_config.block_size)

    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)  # type: ignore[method-assign,assignment]


def _poll_without_spinning() -> None:
    """Engine and worker doze between two looks for each other's next message.

    vLLM yields the core instead, and so keeps it busy: on two cores one of the worker's own threads waits for it.
    """
    shm_broadcast.sched_yield = lambda: time.sleep(POLL_S)
