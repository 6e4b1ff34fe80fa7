"""Prompts from a JSONL file: read, checked line by line, chosen, and split into training and held-out ones."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftline.errors import InputError
from draftline.recipe.schema import Data, resolve_path
from draftline.samples.conversation import PROMPT_FIELDS, BadPrompt, Message, conversation_of, plain_text
from draftline.storage.files import open_user_file

logger = logging.getLogger(__name__)

DEFAULT_DOMAIN = "default"


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the target's answer.

    `number` counts the chosen prompts from 0 in the file's order and names the sample made of it. `messages` are
    `{"role", "content"}` as a chat template takes them, the last one a user's. `line` is its line in the file, from 1.
    """

    number: int
    domain: str
    messages: tuple[Message, ...]
    held_out: bool
    line: int


def read_prompts(recipe_file: Path, data: Data, seed: int) -> list[Prompt]:
    """The prompts that `data` names, in the file's order.

    A line that repeats an earlier conversation is left out (and logged), so that no held-out prompt is also trained on.
    Which prompts are chosen and held out depends on seed, domain and text, not on the file's order.
    Raises InputError naming file and line, also when a domain is left without a training prompt.
    """
    path = resolve_path(recipe_file, "data.prompts", data.prompts)
    prompts = _distinct(path, _read(path, data.field))
    chosen = _choose(recipe_file, path, prompts, data, seed)
    return [replace(prompt, number=number) for number, prompt in enumerate(sorted(chosen, key=lambda p: p.line))]


def check_prompt_lengths(
    path: Path,
    prompts: Sequence[Prompt],
    token_counts: Sequence[int],
    answer_tokens: int,
    row_tokens: int,
    max_model_len: int,
) -> None:
    """Raises InputError for the first prompt that does not fit, with its longest answer, into a row or the engine.

    `token_counts[i]` is the length of prompt i in the target's tokens, chat template included; `answer_tokens` is the
    recipe's data.answer.max_tokens, `row_tokens` its training.row_tokens, `max_model_len` the engine's longest text.
    """
    most, key = min((row_tokens, "training.row_tokens"), (max_model_len, "the target's longest text"))
    for prompt, count in zip(prompts, token_counts, strict=True):
        if count + answer_tokens > most:
            raise InputError(
                f"{path}:{prompt.line}: found a prompt of {count} tokens, with an answer of up to {answer_tokens} "
                f"(data.answer.max_tokens) {count + answer_tokens}; allowed: {most} ({key})"
            )


def _read(path: Path, field: str | None) -> Iterator[Prompt]:
    found = False
    with open_user_file(path, "a JSONL file of prompts (data.prompts)") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                found = True
                yield _parse(f"{path}:{number}", number, line, field)
    if not found:
        raise InputError(f"{path}: found an empty file; allowed: one JSON object a line")


def _parse(place: str, number: int, line: bytes, field: str | None) -> Prompt:
    try:
        entry = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: found the byte {line[error.start]:#04x}; allowed: UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON: {_without_line(error)}; allowed: one JSON object a line") from error
    if not isinstance(entry, dict):
        raise InputError(f"{place}: found {_kind(entry)}; allowed: one JSON object a line")
    name = field or next((name for name in PROMPT_FIELDS if name in entry), None)
    if name not in entry:
        wanted = f"`{field}` (data.field)" if field else f"one of the fields {', '.join(PROMPT_FIELDS)}"
        raise InputError(f"{place}: found the fields {', '.join(entry) or 'none'}; allowed: {wanted}")
    key = "domain"
    try:
        domain = plain_text("", entry.get("domain", DEFAULT_DOMAIN))
        key = str(name)
        return Prompt(-1, domain, conversation_of(entry[name]), held_out=False, line=number)
    except BadPrompt as error:
        raise InputError(f"{place}: {key}{error}") from error


def _without_line(error: Exception) -> str:
    return f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _distinct(path: Path, prompts: Iterator[Prompt]) -> list[Prompt]:
    first: dict[str, Prompt] = {}
    repeats = 0
    for prompt in prompts:
        known = first.setdefault(_text(prompt), prompt)
        repeats += known is not prompt
    if repeats:
        total = repeats + len(first)
        logger.warning("%s: %d of %d prompts repeat an earlier one and are left out", path, repeats, total)
    return list(first.values())


def _choose(recipe_file: Path, path: Path, prompts: Sequence[Prompt], data: Data, seed: int) -> Iterator[Prompt]:
    """The prompts in use, each domain's first ones by hash held out."""
    domains: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: _draw(seed, p)):
        domains[prompt.domain].append(prompt)
    for domain, members in domains.items():
        if len(members) < 2:
            raise InputError(
                f"{path}: domain `{domain}`: found {len(members)} prompt; allowed: at least 2, one to train on and one "
                "held out"
            )
    if data.max_prompts is not None and data.max_prompts < 2 * len(domains):
        raise InputError(
            f"{recipe_file}: data.max_prompts: found {data.max_prompts}; allowed: at least {2 * len(domains)}, one "
            f"prompt to train on and one held out for each of the {len(domains)} domains of {path}"
        )
    quotas = _spread({domain: len(members) for domain, members in sorted(domains.items())}, data.max_prompts)
    for domain, members in domains.items():
        quota = quotas[domain]
        held_out = min(max(1, round(data.held_out_share * quota)), quota - 1)
        yield from (replace(member, held_out=rank < held_out) for rank, member in enumerate(members[:quota]))


def _spread(sizes: dict[str, int], most: int | None) -> dict[str, int]:
    """How many prompts each domain gives: as even as the sizes allow, `most` in all (none: everything)."""
    left = sum(sizes.values()) if most is None else min(most, sum(sizes.values()))
    quotas = {}
    for place, (domain, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        quotas[domain] = min(size, left // (len(sizes) - place))
        left -= quotas[domain]
    return quotas


def _text(prompt: Prompt) -> str:
    return json.dumps(prompt.messages, sort_keys=True)


def _draw(seed: int, prompt: Prompt) -> bytes:
    return hashlib.sha256(f"{seed}\0{prompt.domain}\0{_text(prompt)}".encode()).digest()
