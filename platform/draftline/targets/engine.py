"""A vLLM engine held by a Ray actor: it answers token ids with token ids and says how long it took.

`TargetReplica` extends it with hidden states; evaluation uses it as it is, with and without a draft.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: the token ids that the engine emitted, why it ended, and the seconds from asking to the end."""

    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    states: dict[str, Any] | None = None


class Engine:
    """Owner of one `AsyncLLM` and of its engine processes. Make it an actor with `engine_actor`."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        self._engine_args = dict(engine_args)
        self._llm: Any = None

    async def start(self) -> float:
        """Loads the model; returns the seconds it took."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        began = time.perf_counter()
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_args))
        return time.perf_counter() - began

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answers one prompt. `request_id` must be new."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(extra_args) if extra_args else None,
        )
        began = time.perf_counter()
        final = None
        async for output in self._llm.generate(
            {"prompt_token_ids": list(prompt_token_ids)}, sampling, request_id=request_id
        ):
            final = output
        if final is None or not final.finished:
            raise RuntimeError(f"the engine ended request {request_id} without an answer")
        answer = final.outputs[0]
        return Completion(
            token_ids=tuple(answer.token_ids),
            finish_reason=str(answer.finish_reason),
            seconds=time.perf_counter() - began,
            states=final.kv_transfer_params,
        )

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of the engine's workers (see `vllm_plugin.extension`)."""
        return await self._llm.collective_rpc(method, args=args)

    async def healthy(self) -> bool:
        """True while the engine answers; raises what killed it otherwise."""
        await self._llm.check_health()
        return True

    async def stop(self) -> None:
        """Ends the engine and its processes. Afterwards the actor can only be dropped."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)


def engine_actor(
    engine_class: type[Engine],
    *,
    environment: Mapping[str, str],
    num_cpus: float,
    num_gpus: float,
    name: str,
    concurrency: int,
) -> Any:
    """The Ray actor class for an engine class: environment set before vLLM is imported, many requests at once."""
    import ray

    return ray.remote(engine_class).options(
        name=name,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_concurrency=concurrency,
        max_restarts=0,
        runtime_env={"env_vars": dict(environment)},
    )
