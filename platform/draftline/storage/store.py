"""The artifact store: where a run's record and everything it makes outlive the machines that made them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from draftline.errors import InputError, RunFailed
from draftline.storage.keys import ALLOWED, names_a_folder, parse_s3_url


class NotFound(RunFailed):
    """No object has that key."""


class Conflict(RunFailed):
    """The object is not the version that the writer meant to replace. Nothing was written."""


class Damaged(RunFailed):
    """The bytes are not those that their sha256 says."""


class StoreFailed(RunFailed):
    """The store cannot be reached, refuses, or goes on failing; the message says what to do. What it held is whole."""


class DiskFull(RunFailed):
    """A disk of this machine is full. Raised from the OSError that said so."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object's bytes and its version."""

    data: bytes
    version: str


class ArtifactStore(Protocol):
    """Objects by key (a relative path with `/`). Safe to share between threads and to pickle.

    A version names an object's bytes: an object that was changed and changed back has its old version again, in a
    folder as on S3, whose conditional writes know nothing finer. Two writers that must notice each other therefore
    write bytes that differ, as the run record does with its times.

    Every method may raise StoreFailed, and those that write local files DiskFull; ValueError for a bad key.
    """

    url: str
    """As messages name it; never holds a secret."""

    def read(self, key: str) -> Stored:
        """A small object, whole. Raises NotFound."""

    def write(self, key: str, data: bytes) -> str:
        """Writes a small object, whole or not at all. Returns its version."""

    def write_if(self, key: str, data: bytes, version: str | None) -> str:
        """As `write`, if the object still has that version (None: does not exist). Raises Conflict."""

    def upload(self, file: Path, key: str) -> str:
        """Stores a file of any size, whole or not at all; returns the hex sha256 of what was stored.

        Raises Damaged when the store does not hold what was read from the file. Not for keys that anyone writes with
        `write_if`.
        """

    def download(self, key: str, file: Path, sha256: str) -> None:
        """Makes `file` from an object; leaves it alone on failure. Raises NotFound, Damaged."""

    def sha256(self, key: str) -> str:
        """Hex sha256 of the bytes as they are stored now: reads them all. Raises NotFound."""

    def noted_sha256(self, key: str) -> str | None:
        """What `sha256` would say, as cheaply as the store can tell: S3 notes it with the upload, and loses it when
        someone else replaces the object. None: no such object, or nothing noted."""

    def keys(self, prefix: str) -> list[str]:
        """The keys below the folder `prefix` (`a` has `a/b`, not `ab`), or all for ''; sorted."""

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; those that are absent are fine."""

    def check(self) -> None:
        """Writes, compares, reads back and deletes a probe object. Raises InputError that says what to do."""

    @property
    def folder(self) -> Path | None:
        """The local folder that the store is, or None."""


def open_store(url: str, *, hasty: bool = False) -> ArtifactStore:
    """The store that a folder's path or `s3://bucket/prefix` names; touches neither. Raises InputError.

    `hasty`: someone waits, so a store that cannot be reached is said to be after seconds, not minutes.
    """
    if url.startswith("s3://"):
        from draftline.storage.s3 import S3Store
        from draftline.storage.s3_client import S3Limits

        return S3Store(parse_s3_url(url), S3Limits().hasty() if hasty else None)
    if not names_a_folder(url):
        scheme = url.partition(":")[0].strip()  # the rest may hold a password
        raise InputError(f"store: found {f'{scheme}:...' if scheme else 'nothing'}; allowed: {ALLOWED}")
    from draftline.storage.local import LocalStore

    return LocalStore(Path(url))


def probe(store: ArtifactStore, name: str | None = None) -> None:
    """What `check` does on any store, which messages call by `name`.

    Raises StoreFailed, also when the store does not keep its word, and InputError.
    """
    key = f"draftline-probe-{uuid.uuid4().hex}"
    try:
        _probe(store, key, b"draftline")
    except RunFailed as error:
        # The probe's own name would make its reader look for an object that is not there.
        raise StoreFailed(str(error).replace(key, "").replace(store.url, name or store.url)) from error


def _probe(store: ArtifactStore, key: str, data: bytes) -> None:
    version = store.write_if(key, data, None)
    try:
        try:
            store.write_if(key, b"overwritten", None)
        except Conflict:
            pass
        else:
            raise StoreFailed(
                f"{store.url}: the store ignores conditional writes (If-None-Match), so two drivers could run the same "
                "run; use a store that has them (Amazon S3 and recent versions of others do)"
            )
        if (found := store.read(key)).data != data or found.version != version:
            raise StoreFailed(f"{store.url}: a probe object was read back other than it was written; use another store")
    finally:
        store.delete([key])
