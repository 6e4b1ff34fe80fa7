"""The artifact store in a folder of this machine, or one that all machines share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from draftline.errors import InputError, RunFailed
from draftline.storage.files import atomic_path, sha256_file
from draftline.storage.keys import below, checked_key, is_reserved
from draftline.storage.store import Conflict, Damaged, DiskFull, NotFound, Stored, StoreFailed, probe

_CHUNK_BYTES = 1 << 20
_LOCK = ".store.lock"


class LocalStore:
    """Objects are the files of a folder; it is made at the first write.

    `lock_patience_s`: how long a write waits for the others' writes.
    """

    def __init__(self, folder: Path, *, lock_patience_s: float = 120.0) -> None:
        self._folder = folder.expanduser().absolute()
        self._lock_patience_s = lock_patience_s
        self.url = str(self._folder)

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    def read(self, key: str) -> Stored:
        """See ArtifactStore."""
        with self._reading(key):
            data = self._file(key).read_bytes()
        return Stored(data, _version(data))

    def write(self, key: str, data: bytes) -> str:
        """See ArtifactStore."""
        with self._failures(key), self._locked():
            self._replace(key, data)
        return _version(data)

    def write_if(self, key: str, data: bytes, version: str | None) -> str:
        """See ArtifactStore."""
        with self._failures(key), self._locked():
            file = self._file(key)
            found = _version(file.read_bytes()) if file.is_file() else None
            if found != version:
                raise Conflict(f"{self.url}/{key} was written by another process meanwhile; nothing was changed")
            self._replace(key, data)
        return _version(data)

    def upload(self, file: Path, key: str) -> str:
        """See ArtifactStore."""
        target = self._file(key)
        with self._failures(key), _opened(file) as source:
            if target.exists() and target.samefile(file):
                return sha256_file(file)
            with atomic_path(target) as temporary:
                sent = _copy(source, temporary)
                if sha256_file(temporary) != sent:
                    raise Damaged(f"{self.url}/{key}: the disk holds other bytes than {file}; nothing was changed")
        return sent

    def download(self, key: str, file: Path, sha256: str) -> None:
        """See ArtifactStore."""
        with self._reading(key):
            source = self._file(key).open("rb")
        with source, _failures(f"cannot write {file}"):
            same = file.exists() and file.samefile(source.name)
            with contextlib.nullcontext(file) if same else atomic_path(file) as target:
                found = sha256_file(file) if same else _copy(source, target)
                if found != sha256:
                    raise Damaged(f"{self.url}/{key} is damaged: its sha256 is {found}, not {sha256}")

    def sha256(self, key: str) -> str:
        """See ArtifactStore."""
        with self._reading(key):
            return sha256_file(self._file(key))

    def noted_sha256(self, key: str) -> str | None:
        """See ArtifactStore: a folder notes nothing, so this reads the bytes."""
        try:
            return self.sha256(key)
        except NotFound:
            return None

    def keys(self, prefix: str) -> list[str]:
        """See ArtifactStore."""
        top = self._folder / below(prefix)
        with self._failures(prefix):
            found = (
                (Path(folder) / name).relative_to(self._folder).as_posix()
                for folder, _, names in os.walk(top, onerror=_unless_absent)
                for name in names
            )
            return sorted(key for key in found if not is_reserved(key))

    def delete(self, keys: Sequence[str]) -> None:
        """See ArtifactStore."""
        files = {key: self._file(key) for key in keys}
        for key, file in files.items():
            if file.is_file():
                with self._failures(key), self._locked():
                    file.unlink(missing_ok=True)

    def check(self) -> None:
        """See ArtifactStore. The probe is in a folder of its own, which goes again: a run that is refused later leaves
        neither an empty store nor a lock."""
        try:
            with self._failures(""):
                top = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
                with tempfile.TemporaryDirectory(dir=top, prefix=".draftline-probe-") as folder:
                    probe(LocalStore(Path(folder)), self.url)
                if (self._folder / _LOCK).exists():
                    with self._locked():
                        pass
        except RunFailed as error:
            raise InputError(f"store: {error}") from error

    def _file(self, key: str) -> Path:
        return self._folder / checked_key(key)

    def _replace(self, key: str, data: bytes) -> None:
        with atomic_path(self._file(key)) as temporary:
            temporary.write_bytes(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # One lock for the whole store: conditional writes are rare and short. flock, not lockf, because it also keeps
        # two threads of one process apart; over NFS, Linux turns it into a lock of the server.
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _LOCK).open("ab") as lock:
            deadline = time.monotonic() + self._lock_patience_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise StoreFailed(
                            f"{self.url}: another process has held {_LOCK} for {self._lock_patience_s:g} s; is one of "
                            "them stopped? End it and try again"
                        ) from error
                    time.sleep(0.01)
            yield

    def _failures(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _failures(f"{self.url}/{key}")

    def _reading(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _failures(f"{self.url}/{key}", absent=f"{self.url} has no object {key!r}")


def _version(data: bytes) -> str:
    # The bytes' hash, not the time or the inode: both repeat on coarse clocks and busy disks, and a file that is
    # copied or restored keeps its version. That a value may come back (A, B, A) is in the protocol, for S3's sake too.
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _failures(what: str, absent: str | None = None) -> Iterator[None]:
    """Turns an operating system's error into the store's."""
    try:
        yield
    except OSError as error:
        raise _failure(error, what, absent) from error


def _failure(error: OSError, what: str, absent: str | None) -> RunFailed:
    if absent is not None and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFound(absent)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{what}: the disk or the quota is full ({error.strerror}); make room and try again")
    if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        return StoreFailed(f"{what}: a file is where a folder should be, or a folder where a file should be")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoreFailed(f"{what}: not allowed ({error.strerror}); give this user the right to write there")
    return StoreFailed(f"{what}: {error.strerror or error}; is the disk mounted and well?")


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise StoreFailed(f"cannot read {file}: {error.strerror}") from error


def _copy(source: BinaryIO, target: Path) -> str:
    """Copies to the end; hex sha256 of what was read."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
