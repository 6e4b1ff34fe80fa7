"""Which token ids a target's text never contains, and so which one can stand for a draft's masked positions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import InputError
from draftline.targets.files import chat_template, read_json
from draftline.targets.resolve import ResolvedTarget

_KEPT_FREE = re.compile(r"reserved|unused|extra_id|dummy|placeholder|mask", re.IGNORECASE)


@dataclass(frozen=True)
class Vocabulary:
    """A target's token ids by use.

    `ordinary` holds the ids that text can become, `special` the others that the tokenizer names, `in_use` those of
    them that the chat template or the model's own settings (begin, end, padding, unknown) use.
    """

    ordinary: frozenset[int]
    special: dict[int, str]
    in_use: frozenset[int]

    def use_of(self, token: int) -> str | None:
        """What a token id is used for; none when it is free."""
        if token in self.in_use:
            return f"the special token {self.special.get(token, token)} that the target uses"
        return "a token of ordinary text" if token in self.ordinary and token not in self.special else None

    def free(self, vocab_size: int) -> list[int]:
        """Free ids, best first: rows that the tokenizer never names, then tokens kept in reserve, then the highest."""

        def worth(token: int) -> tuple[bool, bool, int]:
            return token not in self.special, bool(_KEPT_FREE.search(self.special.get(token, ""))), token

        return sorted((token for token in range(vocab_size) if self.use_of(token) is None), key=worth, reverse=True)


def find_mask_token(target: ResolvedTarget, explicit: int | None) -> int:
    """The token id of a draft's masked positions: `explicit` when it is given and free, else the best free one.

    Raises InputError (without the recipe's file, which the caller knows).
    """
    key = "draft.mask_token_id"
    if explicit is not None and explicit >= target.vocab_size:
        raise InputError(f"{key}: found {explicit}; allowed: less than {target.vocab_size}, the target's vocabulary")
    vocabulary = read_vocabulary(target.path)
    free = vocabulary.free(target.vocab_size)
    some = f"a token id that the target never uses, such as {', '.join(map(str, free[:3]))}" if free else ""
    if explicit is None:
        if not free:
            raise InputError(f"{key}: found no unused token id in {target.name}; allowed: a target that has one")
        return free[0]
    if use := vocabulary.use_of(explicit):
        raise InputError(f"{key}: found {explicit}, {use}; allowed: {some or 'none, every token id is in use'}")
    return explicit


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a target's folder, from tokenizer.json or from tiktoken.model and tokenizer_config.json.

    Raises InputError naming the file that is damaged.
    """
    settings_file = folder / "tokenizer_config.json"
    settings = _json(settings_file)
    template = chat_template(folder) or ""
    file = folder / "tokenizer.json"
    if file.is_file():
        tokenizer = _json(file)
        with _undamaged(file):
            added = tokenizer.get("added_tokens", [])
            ordinary = _model_ids(tokenizer["model"]["vocab"])
    else:
        with _undamaged(settings_file):
            added = [{"id": int(token), **entry} for token, entry in settings.get("added_tokens_decoder", {}).items()]
        file = folder / "tiktoken.model"
        with _undamaged(file):
            ordinary = _ranks(file)
    with _undamaged(file):
        special = {int(entry["id"]): str(entry["content"]) for entry in added if entry.get("special")}
        # Added tokens that are not special are matched in plain text, so text can become them.
        ordinary |= {int(entry["id"]) for entry in added if not entry.get("special")}
    with _undamaged(settings_file):
        named = {_content(settings.get(f"{role}_token")) for role in ("bos", "eos", "pad", "unk")}
    in_use = {token for token, content in special.items() if content in named or content in template}
    return Vocabulary(frozenset(ordinary), special, frozenset(in_use | set(_configured(folder))))


@contextlib.contextmanager
def _undamaged(file: Path) -> Iterator[None]:
    """What cannot be read in the block, as it is written there, is the file's fault."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{file} is damaged ({type(error).__name__}: {error}); allowed: a tokenizer's file as it was saved"
        ) from error


def _model_ids(vocab: Any) -> set[int]:
    # BPE and word models map text to id; unigram models list (text, score) by id.
    return set(map(int, vocab.values())) if isinstance(vocab, dict) else set(range(len(vocab)))


def _ranks(file: Path) -> set[int]:
    if not file.is_file():
        raise InputError(f"found neither tokenizer.json nor tiktoken.model in {file.parent}; allowed: one of them")
    with file.open("rb") as lines:
        return {int(line.split()[1]) for line in lines if line.strip()}


def _configured(folder: Path) -> Iterator[int]:
    """Token ids that config.json and generation_config.json name, which can be one or a list."""
    for file in ("config.json", "generation_config.json"):
        settings = _json(folder / file)
        for config in (settings, settings.get("text_config")):
            for key, value in (config or {}).items():
                if key.endswith("_token_id"):
                    values = value if isinstance(value, list) else [value]
                    yield from (token for token in values if isinstance(token, int))


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
