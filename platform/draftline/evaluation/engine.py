"""An engine that also says, for each answer, how every draft fared: the actor that evaluation measures with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from draftline.evaluation.answers import Answer
from draftline.targets.engine import Engine

# Engine arguments that evaluation adds: a cached prefix would make a prompt's second answer faster than its first.
PLAIN_ENGINE_ARGS: dict[str, Any] = {"enable_prefix_caching": False}
DRAFT_ENGINE_ARGS: dict[str, Any] = {**PLAIN_ENGINE_ARGS, "per_request_spec_decode_metrics": "detailed"}


class MeasuredEngine(Engine):
    """Start it with `PLAIN_ENGINE_ARGS` or `DRAFT_ENGINE_ARGS` beside the arguments of the target and the draft."""

    async def measure(self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Answers one prompt greedily. `request_id` must be new."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": list(prompt_token_ids)}
        began = time.perf_counter()
        final: Any = None
        async for output in self._llm.generate(prompt, sampling, request_id=request_id):
            final = output
        seconds = time.perf_counter() - began
        if final is None or not final.finished:
            raise RuntimeError(f"the engine ended request {request_id} without an answer")
        answer = final.outputs[0]
        drafts = answer.spec_decode_metrics
        return Answer(
            token_ids=tuple(answer.token_ids),
            seconds=seconds,
            drafted=tuple(drafts.per_step_drafted) if drafts else (),
            accepted=tuple(drafts.per_step_accepted) if drafts else (),
        )

    async def set_confidence_cut(self, cut: float) -> float:
        """Where drafts end from now on (CPU plugin only), 0: nowhere; returns the cut until now."""
        before: list[float] = await self.call_workers("set_confidence_cut", cut)
        return before[0]
