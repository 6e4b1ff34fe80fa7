"""Prompts become token ids by the target's own tokenizer and chat template, in a task: the driver stays light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftline.errors import InputError


def tokenize(
    target: str,
    conversations: Mapping[str, Sequence[dict[str, str]]],
    template_args: Mapping[str, Any],
    trust_remote_code: bool,
) -> list[list[int]]:
    """Token ids of each conversation, ready for an answer. `target` is the target's folder; each conversation is named
    by its place in the prompts' file.

    Raises InputError for a tokenizer that cannot be loaded and for a conversation that the chat template refuses.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind: the tokenizer's files, or the target's own code
        raise InputError(f"{target}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    token_ids = []
    for place, messages in conversations.items():
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True, **template_args
            )
        except Exception as error:  # of any kind: a template can call what it likes
            raise InputError(f"{place}: the target's chat template refuses it: {_first_line(error)}") from error
        token_ids.append(list(encoded["input_ids"]))
    return token_ids


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
