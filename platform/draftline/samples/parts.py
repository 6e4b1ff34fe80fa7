"""Answers on disk before all of them are there: what a run that was cut off need not ask the target again."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

from draftline.samples.rows import Sample, read_samples, write_samples
from draftline.storage.files import sha256_file
from draftline.storage.workspace import Workspace

SUFFIX = ".parquet"


class AnswerParts:
    """Parquet files named by their own sha256, in `folder` and in the artifact store: a damaged one shows itself."""

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self._workspace = workspace
        self._folder = folder

    def read(self) -> list[Sample]:
        """All samples of the parts that verify; the others are removed."""
        samples: list[Sample] = []
        for name in self._names():
            digest = Path(name).name.removesuffix(SUFFIX)
            if self._workspace.fetch({name: digest}):
                self._workspace.remove(name)
            else:
                samples += read_samples(self._workspace.folder / name)
        return samples

    def add(self, samples: Iterable[Sample]) -> None:
        """Keeps these samples as one more part."""
        temporary = self._folder / f".{uuid.uuid4().hex}"
        write_samples(temporary, samples)
        part = self._folder / (sha256_file(temporary) + SUFFIX)
        temporary.replace(part)
        self._workspace.publish(part)

    def clear(self) -> None:
        """Removes all parts, here and in the store."""
        self._workspace.remove(*self._names())

    def _names(self) -> list[str]:
        names = self._workspace.names(self._workspace.name(self._folder))
        return [name for name in names if name.endswith(SUFFIX)]
