"""On-policy data: the target itself answers the prompts, and its token ids are kept as the engine saw them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from draftline.recipe.schema import Answer
from draftline.samples.prompts import Prompt
from draftline.samples.rows import Sample

# Requests in flight per replica: enough to keep the engine's batch full, few enough to keep its queue short.
IN_FLIGHT = 64
PROGRESS_WAIT_S = 1.0
# Answers are kept on disk in parts, at the latest after so many or so long.
KEEP_SAMPLES = 1024
KEEP_S = 20.0


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
    *,
    known: Iterable[Sample] = (),
    on_progress: Callable[[int, int], None] = lambda answered, tokens: None,
    on_loss: Callable[[Exception], Sequence[Any]] | None = None,
    keep: Callable[[list[Sample]], None] = lambda samples: None,
) -> list[Sample]:
    """Answers every prompt; returns samples in the prompts' order.

    `replicas` are `TargetReplica` actor handles. `known` are samples of an earlier attempt, which are not asked for
    again. `on_progress(answered, answer_tokens)` is called about once a second, `keep` now and then with what has been
    answered since. `on_loss(error)` returns the replicas that live once the lost ones are replaced, or raises; none: a
    lost replica's error is raised.
    """
    import ray

    asked = {prompt.number: (prompt, tuple(ids)) for prompt, ids in zip(prompts, prompt_token_ids, strict=True)}
    done = {sample.number: sample for sample in known if _answers(sample, asked)}
    waiting = [number for number in asked if number not in done][::-1]
    in_flight: dict[Any, tuple[int, Any]] = {}
    live = list(replicas)
    fresh: list[Sample] = []
    answer_tokens, kept_at = 0, time.monotonic()

    def ask_for_more() -> None:
        load = Counter(replica for _, replica in in_flight.values())
        while waiting and load[replica := min(live, key=load.__getitem__)] < IN_FLIGHT:
            number = waiting.pop()
            ids = list(asked[number][1])
            ref = replica.answer.remote(number, ids, answer.max_tokens, answer.temperature, answer.top_p, seed)
            in_flight[ref] = (number, replica)
            load[replica] += 1

    def take(number: int, completion: Any) -> None:
        prompt, ids = asked[number]
        done[number] = Sample(
            number=number,
            domain=prompt.domain,
            held_out=prompt.held_out,
            token_ids=(*ids, *completion.token_ids),
            prompt_tokens=len(ids),
            finish_reason=completion.finish_reason,
        )
        fresh.append(done[number])

    try:
        while True:
            ask_for_more()
            if not in_flight:
                return [done[number] for number in asked]
            ready, _ = ray.wait(list(in_flight), num_returns=1, timeout=PROGRESS_WAIT_S)
            for ref in ready:
                number, replica = in_flight.pop(ref)
                try:
                    completion = ray.get(ref)
                except ray.exceptions.RayError as error:
                    waiting.append(number)
                    if replica in live:  # the first of its requests to fail
                        if on_loss is None:
                            raise
                        live = list(on_loss(error))
                    continue
                answer_tokens += len(completion.token_ids)
                take(number, completion)
            if len(fresh) >= KEEP_SAMPLES or (fresh and time.monotonic() - kept_at >= KEEP_S):
                keep(fresh)
                fresh, kept_at = [], time.monotonic()
            on_progress(len(done), answer_tokens)
    except BaseException:
        if fresh:  # on the way out too: a run that is stopped asks for nothing twice
            keep(fresh)
        raise


def _answers(sample: Sample, asked: Mapping[int, tuple[Prompt, tuple[int, ...]]]) -> bool:
    """Whether a kept sample answers what is asked now under its number."""
    if sample.number not in asked:
        return False
    prompt, ids = asked[sample.number]
    asked_for = (prompt.domain, prompt.held_out, ids)
    return (sample.domain, sample.held_out, sample.token_ids[: sample.prompt_tokens]) == asked_for
