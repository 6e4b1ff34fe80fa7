"""The samples that could not be extracted, in the artifact store: a resumed run leaves out the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from draftline.storage.store import ArtifactStore, NotFound


@dataclass(frozen=True, slots=True)
class SkipList:
    """A run's skip list and where it is kept."""

    store: ArtifactStore
    key: str

    def read(self) -> dict[tuple[int, int], str]:
        """Reason by (sample, epoch); empty when none was written."""
        try:
            values = json.loads(self.store.read(self.key).data)
        except NotFound:
            return {}
        return {(skip["sample"], skip["epoch"]): skip["reason"] for skip in values}

    def write(self, skipped: Mapping[tuple[int, int], str]) -> None:
        """Writes the whole list, or nothing."""
        values = [{"sample": sample, "epoch": epoch, "reason": why} for (sample, epoch), why in skipped.items()]
        self.store.write(self.key, json.dumps(values, indent=1, ensure_ascii=False).encode())
