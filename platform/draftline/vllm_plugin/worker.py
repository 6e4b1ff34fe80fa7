"""vLLM's CPU worker with DSpark drafts (`worker_cls`). Without a DSpark draft it is vLLM's own CPU worker."""

from __future__ import annotations

import copy

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from draftline.vllm_plugin import patches
from draftline.vllm_plugin.confidence import Cut, read_cut, threshold
from draftline.vllm_plugin.costs import step_costs_s
from draftline.vllm_plugin.extension import WorkerExtension
from draftline.vllm_plugin.proposer import DSparkProposer

logger = init_logger("vllm.draftline")


class DSparkCPUWorker(CPUWorker, WorkerExtension):
    """Hands the V1 runner a DSpark proposer and settles where drafts end.

    Drafts of changing length need vLLM's synchronous scheduling, which its CPU platform always takes.
    """

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

    def set_confidence_cut(self, cut: float) -> float:
        """Drafts end where the product of confidences falls below `cut` from now on; 0: never. Returns the last cut."""
        if self.proposer is None:
            raise ValueError("this engine has no draft to cut")
        if cut > 0.0 and not self.proposer.has_confidence_head:
            raise ValueError(f"cannot cut at {cut}: the draft has no confidence head")
        before, self.proposer.confidence_cut = self.proposer.confidence_cut, cut
        return before

    def _choose_cut(self, proposer: DSparkProposer) -> float:
        if self.cut != "auto":
            if self.cut > 0.0 and not proposer.has_confidence_head:
                raise ValueError(f"confidence_cut is {self.cut}, but the draft has no confidence head; allowed: 0")
            return self.cut
        if not proposer.has_confidence_head:
            logger.info("confidence cut: none, the draft has no confidence head")
            return 0.0
        costs_s = step_costs_s(self, proposer.num_speculative_tokens, proposer.queries)
        cut = threshold(costs_s)
        logger.info(
            "confidence cut %.3f chosen from steps of %s ms that verify 0..%d drafted tokens",
            cut,
            " ".join(f"{cost_s * 1e3:.1f}" for cost_s in costs_s),
            len(costs_s) - 1,
        )
        return cut


def _as_dflash(config: VllmConfig) -> VllmConfig:
    """A copy of `config` for the runner, which knows DSpark's backbone as DFlash. The scheduler's stays as it is."""
    draft = copy.copy(config.speculative_config)
    assert draft is not None
    draft.method = "dflash"
    ours = copy.copy(config)
    ours.speculative_config = draft
    return ours
