"""The manifest of an exported draft: what it is, what it was made of, and the sha256 of each of its files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftline.storage.files import sha256_tree, write_json_atomic

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a draft was made of."""

    target: str
    recipe_sha256: str
    data_sha256: str
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # settings that extraction and serving must share

    def identity(self, seed: int) -> dict[str, str | int]:
        """What makes two trainings the same one: a checkpoint of another identity is never continued."""
        return {"target": self.target, "recipe": self.recipe_sha256, "data": self.data_sha256, "seed": seed}


@dataclass(frozen=True, slots=True)
class DraftManifest:
    """`manifest.json` in the draft's folder."""

    provenance: Provenance
    draft_tokens: int  # most tokens that one pass drafts
    metrics: dict[str, float]
    files: dict[str, str]  # sha256 by path relative to the folder

    @classmethod
    def read(cls, folder: Path) -> DraftManifest:
        """The manifest of an exported draft. Raises OSError, and ValueError for what is no manifest."""
        values: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        try:
            return cls(**(values | {"provenance": Provenance(**values["provenance"])}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / MANIFEST} is no manifest of a draft: {error}") from error

    def write(self, folder: Path) -> None:
        """Writes the manifest beside the files that it lists."""
        write_json_atomic(folder / MANIFEST, asdict(self))

    def damaged(self, folder: Path) -> list[str]:
        """Files that are missing, differ, or that the manifest does not know, sorted; none when all is well."""
        found = draft_files(folder)
        return sorted(name for name in found.keys() | self.files.keys() if found.get(name) != self.files.get(name))


def draft_files(folder: Path) -> dict[str, str]:
    """sha256 of every file of a draft's folder but the manifest."""
    return {name: digest for name, digest in sha256_tree(folder).items() if name != MANIFEST}
