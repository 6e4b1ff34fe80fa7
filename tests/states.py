"""Hidden states of the tiny target by transformers, for tests that need no engine and no store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draftline.training.rows import SampleStates


class TinyTarget:
    """The target in float32: greedy answers and hidden states."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Prompt and the next `tokens` greedy tokens; the end token does not end it."""
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            for _ in range(tokens):
                ids = torch.cat([ids, self.model(ids).logits[:, -1:].argmax(-1)], dim=1)
        return ids[0].tolist()

    def states(self, token_ids: Sequence[int], prompt_tokens: int, taps: Sequence[int]) -> SampleStates:
        """The sample with the states that the store would give."""
        last: list[torch.Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(
            lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
        )
        ids = torch.tensor(token_ids)
        with torch.no_grad():
            outputs = self.model(ids[None], output_hidden_states=True)
        hook.remove()
        layers = [outputs.hidden_states[tap][0] for tap in taps] + [last[0].view(len(token_ids), -1)]
        return SampleStates(torch.stack(layers, dim=1), ids, prompt_tokens)


def tiny_samples(
    target: TinyTarget, count: int, taps: Sequence[int], *, seed: int = 0, tokens: int = 24
) -> list[SampleStates]:
    """Samples with random prompts of 6 to 12 tokens and the target's own greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(6, 13, (1,), generator=generator))
        prompt = torch.randint(8, 264, (length,), generator=generator).tolist()
        samples.append(target.states(target.greedy(prompt, tokens), length, taps))
    return samples
