"""The actor that holds the target: it answers prompts, and writes hidden states of token ids into Mooncake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftline.targets.engine import Completion, Engine

# What the connector looks for in a request (hidden_states.connector.CAPTURE; not imported: it would load vLLM).
CAPTURE_REQUEST = {"kv_transfer_params": {"draftline_capture": True}}


class TargetReplica(Engine):
    """One engine for both jobs: the replicas that answered stay up and capture hidden states afterwards."""

    async def answer(
        self, sample: int, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> Completion:
        """The target's own answer to a prompt. Sampling is seeded by run and sample, so that it can be repeated."""
        # With temperature 0 vLLM ignores the seed; with others it makes the answer independent of the batch's order.
        return await self.generate(
            f"answer-{sample}-{seed}", prompt_token_ids, max_tokens, temperature, top_p, seed=seed + sample
        )

    async def capture(self, key: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """Runs the target over `token_ids` and returns the manifest of the hidden states, which travel by Mooncake.

        The manifest can come before the states: readers poll.
        """
        completion = await self.generate(key, token_ids, max_tokens=1, extra_args=CAPTURE_REQUEST)
        if completion.states is None:
            raise RuntimeError(f"the engine returned no manifest for {key}")
        return completion.states | {"next_token_id": completion.token_ids[0]}

    async def rejoin(self, master_address: str) -> None:
        """Has the engine's writers join the store of a master at another address."""
        await self.call_workers("rejoin_store", master_address)

    async def set_threads(self, threads: int) -> None:
        """CPU threads of the engine from now on: all cores while it works alone, fewer beside the trainer."""
        await self.call_workers("set_threads", threads)
