"""What makes a checkpoint's folder whole: a manifest that vouches for every file and for itself. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftline.storage.files import sha256_tree, write_json_atomic
from draftline.storage.keys import is_reserved
from draftline.storage.workspace import MANIFEST

_NAME = re.compile(r"step-(\d{8,})")


class CheckpointDamaged(Exception):
    """A checkpoint is not what was saved; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`manifest.json` of a checkpoint: beside these fields it holds a sha256 of them."""

    step: int
    identity: dict[str, Any]
    files: dict[str, str]  # hex sha256 by path relative to the folder


def folder_name(step: int) -> str:
    """Name of the folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, step: int, identity: dict[str, Any]) -> Manifest:
    """Writes the manifest of the files that lie in `folder`; they and it are on disk when this returns."""
    files = {name: digest for name, digest in sha256_tree(folder).items() if name != MANIFEST}
    for name in files:
        _flush(folder / name)
    manifest = Manifest(step, identity, files)
    write_json_atomic(folder / MANIFEST, asdict(manifest) | {"sha256": _digest(asdict(manifest))})
    return manifest


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes. Raises CheckpointDamaged for what is none, or not as it was written."""
    try:
        values = json.loads(data)
        digest = values.pop("sha256")
        manifest = Manifest(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(f"{MANIFEST} is no manifest of a checkpoint ({error})") from error
    if digest != _digest(values):
        raise CheckpointDamaged(f"{MANIFEST} does not match its own sha256")
    return manifest


def verified(folder: Path) -> Manifest:
    """The manifest of a folder whose files are all as they were saved. Raises CheckpointDamaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointDamaged(f"{MANIFEST} is missing")
    manifest = parse_manifest(path.read_bytes())
    found = {name: digest for name, digest in sha256_tree(folder).items() if name != MANIFEST and not is_reserved(name)}
    problems = [f"{name} is missing" for name in manifest.files.keys() - found.keys()]
    problems += [f"{name} does not belong to it" for name in found.keys() - manifest.files.keys()]
    problems += [
        f"{name} has other bytes" for name, digest in found.items() if manifest.files.get(name, digest) != digest
    ]
    if problems:
        raise CheckpointDamaged("; ".join(sorted(problems)))
    return manifest


def rename_on_disk(old: Path, new: Path) -> None:
    """Renames within one folder; the new name is on disk when this returns."""
    old.replace(new)
    _flush(new.parent)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
