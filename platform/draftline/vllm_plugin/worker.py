"""vLLM's CPU worker with DSpark drafts (`worker_cls`). Without a DSpark draft it is vLLM's own CPU worker."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from draftline.vllm_plugin import patches
from draftline.vllm_plugin.confidence import ACCEPTANCE_GUESS, Cut, read_cut, threshold
from draftline.vllm_plugin.extension import WorkerExtension
from draftline.vllm_plugin.proposer import DSparkProposer

logger = init_logger("vllm.draftline")

REPEATS = 5  # times that each cost is measured; the same number on every rank, which run them together


class DSparkCPUWorker(CPUWorker, WorkerExtension):
    """Hands the V1 runner a DSpark proposer and, for the cut "auto", measures what verifying a token costs."""

    proposer: DSparkProposer | None = None

    def init_device(self) -> None:
        """Raises ValueError if the drafts asked for cannot run in this engine."""
        config = self.speculative_config
        if config is None or not config.use_dspark():
            super().init_device()
            return
        if not patches.applied():
            raise ValueError(f"DSpark on CPU needs draftline's plugin and vLLM {patches.SUPPORTED_VERSION}*")
        options = self.vllm_config.additional_config
        self.cut: Cut = read_cut(options if isinstance(options, dict) else None)
        if self.cut != 0.0 and self.scheduler_config.async_scheduling:
            raise ValueError(
                f"confidence_cut is {self.cut}: drafts of changing length need async_scheduling=False in the engine's "
                "arguments"
            )
        self.vllm_config = _as_dflash(self.vllm_config)
        self.speculative_config = self.vllm_config.speculative_config
        super().init_device()
        assert self.device is not None
        runner = self.model_runner
        self.proposer = DSparkProposer(self.vllm_config, self.device, runner)
        runner.drafter = self.proposer
        # vLLM leaves room for n + 1 queries at the end of the longest sequence.
        runner.effective_drafter_max_model_len -= max(0, self.proposer.queries - runner.num_spec_tokens - 1)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """The last step of the engine's start: the model and its cache are there."""
        times = super().compile_or_warm_up_model()
        if self.proposer is not None:
            self.proposer.confidence_cut = self._choose_cut(self.proposer)
        return times

    def _choose_cut(self, proposer: DSparkProposer) -> float:
        if self.cut != "auto":
            if self.cut > 0.0 and not proposer.has_confidence_head:
                raise ValueError(f"confidence_cut is {self.cut}, but the draft has no confidence head; allowed: 0")
            return self.cut
        if not proposer.has_confidence_head:
            logger.info("confidence cut: none, the draft has no confidence head")
            return 0.0
        curve_s, draft_s = self.measure_costs()
        cut = threshold(curve_s, draft_s, ACCEPTANCE_GUESS)
        logger.info(
            "confidence cut %.3f chosen from %.1f ms a draft pass and %s ms to verify 0..%d drafted tokens",
            cut,
            draft_s * 1e3,
            " ".join(f"{cost_s * 1e3:.1f}" for cost_s in curve_s),
            len(curve_s) - 1,
        )
        return cut

    def set_confidence_cut(self, cut: float) -> float:
        """Where drafts end from now on, 0: nowhere; returns where they ended before. For `collective_rpc`."""
        if self.proposer is None:
            raise ValueError("confidence cut: the engine has no DSpark draft")
        if cut > 0.0 and (not self.proposer.has_confidence_head or self.scheduler_config.async_scheduling):
            raise ValueError(f"confidence_cut is {cut}; allowed: 0, as the engine cannot cut drafts")
        before, self.proposer.confidence_cut = self.proposer.confidence_cut, cut
        return before

    @torch.inference_mode()
    def measure_costs(self) -> tuple[list[float], float]:
        """This engine's own costs for one request: (target forward that verifies 0..n tokens, draft pass), in seconds.

        Attention is left out: it reads next to nothing in a short context, and the weights dominate.
        """
        assert self.proposer is not None
        lengths = range(self.proposer.num_speculative_tokens + 1)
        passes: list[Callable[[], object]] = [partial(self._verify, k + 1) for k in lengths]
        passes.append(self.proposer.dummy_pass)
        # In turns, so that a busy moment of the machine does not fall on one length alone.
        rounds = [[_seconds(run) for run in passes] for _ in range(REPEATS + 1)][1:]
        *curve_s, draft_s = (statistics.median(times) for times in zip(*rounds, strict=True))
        return curve_s, draft_s

    def _verify(self, tokens: int) -> torch.Tensor:
        runner = self.model_runner
        model: Any = runner.model
        with set_forward_context(None, self.vllm_config, num_tokens=tokens, slot_mapping={}):
            output = model(
                input_ids=runner.input_ids.gpu[:tokens],
                positions=torch.arange(tokens),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        hidden_states = output[0] if isinstance(output, tuple) else output
        return model.compute_logits(hidden_states).argmax(dim=-1)


def _as_dflash(config: VllmConfig) -> VllmConfig:
    """A copy of `config` for the runner, which knows DSpark's backbone as DFlash. The scheduler's stays as it is."""
    draft = copy.copy(config.speculative_config)
    assert draft is not None
    draft.method = "dflash"
    ours = copy.copy(config)
    ours.speculative_config = draft
    return ours


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
