"""The worker of a target replica on a CPU: captures hidden states without verifying drafts that are none.

vLLM captures by way of speculative decoding: its proposer hands each sampled token back as a "draft", which the target
then computes once more in every decoding step. Answering prompts would take nearly twice the arithmetic.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.worker.cpu_worker import CPUWorker

from draftline.vllm_plugin.extension import WorkerExtension


class SilentProposer(ExtractHiddenStatesProposer):
    """Caches hidden states and proposes nothing."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Drafts of every request: none."""
        return [[] for _ in super().propose(*args, **kwargs)]


class CaptureCPUWorker(CPUWorker, WorkerExtension):
    """Hands the V1 runner a proposer that proposes nothing."""

    def init_device(self) -> None:
        """As vLLM's worker does, then swaps the proposer before the model is loaded."""
        super().init_device()
        self.model_runner.drafter = SilentProposer(self.vllm_config, self.device)
