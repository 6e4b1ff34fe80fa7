"""A run's working folder on this machine, and its place in the artifact store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from draftline.storage.files import sha256_file, user_path
from draftline.storage.keys import is_reserved, join
from draftline.storage.store import ArtifactStore, Damaged, NotFound

MANIFEST = "manifest.json"
"""The file that says that a published folder is whole: the last to come, the first to go."""


class Workspace:
    """Files by name: their path below the folder, with `/`; the key of each is the prefix and the name.

    When the folder is the very place that a store in a folder keeps them, nothing is sent or fetched. Picklable.
    Methods raise what the store raises, and ValueError for a path that is not below the folder.
    """

    def __init__(self, store: ArtifactStore, prefix: str, folder: Path) -> None:
        self.store = store
        self.prefix = prefix.strip("/")
        self.folder = folder.absolute()
        self._in_place = store.folder is not None and store.folder / self.prefix == self.folder

    def publish(self, *paths: Path) -> dict[str, str]:
        """Sends files, and folders whole; returns the hex sha256 of each by name, sorted.

        What the store holds already with that sha256 is not sent again. Raises FileNotFoundError.
        """
        return {self.name(file): self._send(file) for file in _files(*paths)}

    def publish_folder(self, path: Path) -> dict[str, str]:
        """As `publish`, with the folder's `manifest.json` last: whoever sees that sees all of the folder and no more.

        Raises ValueError for a folder without one.
        """
        manifest = path / MANIFEST
        if not manifest.is_file():
            raise ValueError(f"{path} has no {MANIFEST}, so nobody could tell when it is whole")
        name = self.name(manifest)
        others = [file for file in _files(path) if file != manifest]
        if not self._in_place:
            if self.store.noted_sha256(self._key(name)) not in (None, sha256_file(manifest)):
                self.store.delete([self._key(name)])  # an older folder of that name: it is not whole from here on
            stale = set(self.names(self.name(path))) - {self.name(file) for file in others} - {name}
            self.store.delete([self._key(each) for each in sorted(stale)])
        return dict(sorted({**self.publish(*others), **self.publish(manifest)}.items()))

    def fetch(self, outputs: Mapping[str, str]) -> list[str]:
        """Makes each output (name -> hex sha256) present in the folder, from the store when it must.

        Returns the names whose bytes in the store are missing or other ones: every object is read and hashed.
        """
        return [name for name, sha256 in outputs.items() if not self._fetch(name, sha256)]

    def names(self, below: str) -> list[str]:
        """The names in the store below a folder's name ('' for all), sorted."""
        start = f"{self.prefix}/" if self.prefix else ""
        return [key.removeprefix(start) for key in self.store.keys(self._key(below.strip("/")))]

    def remove(self, *names: str) -> None:
        """Deletes files here and in the store, manifests first; those that are absent are fine."""
        for some in (_manifests(*names), [name for name in names if name not in _manifests(*names)]):
            self.store.delete([self._key(name) for name in some])
            for name in some:
                file = self.folder / name
                file.unlink(missing_ok=True)
                _remove_empty(file.parent, self.folder)

    def name(self, path: Path) -> str:
        """The name of a file or folder below the working folder."""
        return path.absolute().relative_to(self.folder).as_posix()

    def _key(self, name: str) -> str:
        return join(self.prefix, name)

    def _send(self, file: Path) -> str:
        if self._in_place:
            return sha256_file(file)
        key, sha256 = self._key(self.name(file)), sha256_file(file)
        return sha256 if self.store.noted_sha256(key) == sha256 else self.store.upload(file, key)

    def _fetch(self, name: str, sha256: str) -> bool:
        file, key = self.folder / name, self._key(name)
        try:
            if self._in_place or (file.is_file() and sha256_file(file) == sha256):
                return self.store.sha256(key) == sha256
            self.store.download(key, file, sha256)
        except (NotFound, Damaged):
            return False
        return True


def working_folder(store: ArtifactStore, run_id: str) -> Path:
    """Where a run works on this machine: in the store when that is a folder, else below the cache folder, apart from
    the runs of other stores."""
    if store.folder is not None:
        return store.folder / run_id
    return cache_folder() / "work" / hashlib.sha256(store.url.encode()).hexdigest()[:16] / run_id


def cache_folder() -> Path:
    """What this machine keeps between runs: `$DRAFTLINE_CACHE`, or `~/.cache/draftline`. Raises InputError."""
    return user_path(Path.cwd(), os.environ.get("DRAFTLINE_CACHE") or "~/.cache/draftline", "DRAFTLINE_CACHE")


def _files(*paths: Path) -> Iterator[Path]:
    found = {file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if not file.is_dir()}
    return iter(sorted(file for file in found if not is_reserved(file.name)))


def _manifests(*names: str) -> list[str]:
    return [name for name in names if name.rpartition("/")[2] == MANIFEST]


def _remove_empty(folder: Path, top: Path) -> None:
    while folder != top and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
