"""What a decode step costs this engine, measured on the worker's own real steps for a made-up request."""

from __future__ import annotations

import math
import time
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

REQUEST = "draftline-cost"
CONTEXT_TOKENS = 128  # of the made-up request: attention should cost what it costs in an ordinary conversation
ROUNDS = 7  # a fixed number: every rank runs the same steps together, whatever each of them measures


def step_costs_s(worker: Any, draft_tokens: int, queries: int) -> list[float]:
    """Seconds of a whole step of one request that verifies 0, 1, ... `draft_tokens` drafted tokens.

    A step is the target's forward, verification and a draft pass of `queries` queries. To be called once the engine's
    cache exists and before it serves: the request takes the cache's first blocks and leaves nothing behind.
    """
    context = min(
        CONTEXT_TOKENS,
        worker.scheduler_config.max_num_batched_tokens,
        worker.model_config.max_model_len - draft_tokens - queries - 2,
    )
    lengths = range(draft_tokens + 1)
    _step(worker, _prompt(worker, context, context + 1 + draft_tokens + queries))
    # Lengths in turns, so that a busy moment of the machine does not fall on one of them; the first round warms up.
    rounds = [[_step(worker, _decode(context, drafts)) for drafts in lengths] for _ in range(ROUNDS + 1)][1:]
    gone = SchedulerOutput.make_empty()
    gone.finished_req_ids = {REQUEST}
    _step(worker, gone)
    return [min(times) for times in zip(*rounds, strict=True)]  # anything above is the machine being busy


def _prompt(worker: Any, tokens: int, room: int) -> SchedulerOutput:
    """The step that computes the request's prompt of `tokens` tokens, with cache blocks for `room` tokens."""
    blocks, free = [], 1  # block 0 is vLLM's placeholder
    for group in worker.model_runner.kv_cache_config.kv_cache_groups:
        count = math.ceil(room / group.kv_cache_spec.block_size)
        blocks.append(list(range(free, free + count)))
        free += count
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=REQUEST,
            prompt_token_ids=[0] * tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
            pooling_params=None,
            block_ids=tuple(blocks),
            num_computed_tokens=0,
            lora_request=None,
        )
    ]
    output.num_scheduled_tokens = {REQUEST: tokens}
    output.total_num_scheduled_tokens = tokens
    return output


def _decode(context: int, drafts: int) -> SchedulerOutput:
    """A step that verifies `drafts` tokens. It starts over from the first answer token, so that all are alike."""
    cached = CachedRequestData.make_empty()
    cached.req_ids = [REQUEST]
    cached.new_block_ids = [None]
    cached.num_computed_tokens = [context]
    cached.num_output_tokens = [1]
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = {REQUEST: 1 + drafts}
    output.total_num_scheduled_tokens = 1 + drafts
    if drafts:
        output.scheduled_spec_decode_tokens = {REQUEST: [0] * drafts}
    return output


def _step(worker: Any, output: SchedulerOutput) -> float:
    output.num_spec_tokens_to_schedule = worker.model_runner.num_spec_tokens
    start = time.perf_counter()
    if worker.execute_model(output) is None:
        worker.sample_tokens(None)
    return time.perf_counter() - start
