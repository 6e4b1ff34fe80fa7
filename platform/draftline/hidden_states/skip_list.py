"""The samples that could not be extracted, on disk: a resumed run leaves out the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from draftline.storage.files import write_json_atomic


def read_skip_list(path: Path) -> dict[tuple[int, int], str]:
    """Reason by (sample, epoch); empty when there is no such file."""
    if not path.exists():
        return {}
    return {(skip["sample"], skip["epoch"]): skip["reason"] for skip in json.loads(path.read_text(encoding="utf-8"))}


def write_skip_list(path: Path, skipped: Mapping[tuple[int, int], str]) -> None:
    """Writes the whole list, atomically."""
    write_json_atomic(
        path, [{"sample": sample, "epoch": epoch, "reason": why} for (sample, epoch), why in skipped.items()]
    )
