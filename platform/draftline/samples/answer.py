"""On-policy data: the target itself answers the prompts, and its token ids are kept as the engine saw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from draftline.recipe.schema import Answer
from draftline.samples.prompts import Prompt
from draftline.samples.rows import Sample

# Requests in flight per replica: enough to keep the engine's batch full, few enough to keep its queue short.
IN_FLIGHT = 64
PROGRESS_WAIT_S = 1.0


def conversation(prompt: Prompt, answer: Answer) -> list[dict]:
    """The messages that the target sees: the recipe's system message first, unless the prompt brings its own."""
    own = prompt.messages[0]["role"] == "system"
    system = [{"role": "system", "content": answer.system_prompt}] if answer.system_prompt and not own else []
    return [*system, *prompt.messages]


def answer_prompts(
    replicas: Sequence[Any],
    prompts: Sequence[Prompt],
    prompt_token_ids: Sequence[Sequence[int]],
    answer: Answer,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> list[Sample]:
    """Answers every prompt; returns samples in the prompts' order.

    `replicas` are `TargetReplica` actor handles; `on_progress(answered, answer_tokens)` is called about once a second.
    """
    import ray

    waiting = list(zip(prompts, prompt_token_ids, strict=True))[::-1]
    in_flight: dict[Any, tuple[Prompt, Sequence[int], Any]] = {}
    done: dict[int, Sample] = {}
    answer_tokens = 0

    def ask(replica: Any) -> None:
        prompt, ids = waiting.pop()
        ref = replica.answer.remote(prompt.number, list(ids), answer.max_tokens, answer.temperature, answer.top_p, seed)
        in_flight[ref] = (prompt, ids, replica)

    for _ in range(IN_FLIGHT):
        for replica in replicas:
            if waiting:
                ask(replica)
    while in_flight:
        ready, _ = ray.wait(list(in_flight), num_returns=1, timeout=PROGRESS_WAIT_S)
        for ref in ready:
            prompt, ids, replica = in_flight.pop(ref)
            completion = ray.get(ref)
            answer_tokens += len(completion.token_ids)
            done[prompt.number] = Sample(
                number=prompt.number,
                domain=prompt.domain,
                held_out=prompt.held_out,
                token_ids=(*ids, *completion.token_ids),
                prompt_tokens=len(ids),
                finish_reason=completion.finish_reason,
            )
            if waiting:
                ask(replica)
        on_progress(len(done), answer_tokens)
    return [done[prompt.number] for prompt in prompts]
