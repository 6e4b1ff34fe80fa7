"""Prompts become token ids by the target's own tokenizer and chat template, in a task: the driver stays light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def tokenize(
    target: str,
    conversations: Sequence[Sequence[dict[str, str]]],
    template_args: Mapping[str, Any],
    trust_remote_code: bool,
) -> list[list[int]]:
    """Token ids of each conversation, ready for an answer. `target` is the target's folder."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    return [
        list(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True, **template_args
            )["input_ids"]
        )
        for messages in conversations
    ]
