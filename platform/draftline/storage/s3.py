"""The artifact store in a bucket of S3, or of a store that speaks its protocol."""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftline.errors import InputError, RunFailed
from draftline.storage.files import atomic_path, sha256_file
from draftline.storage.keys import S3Place, below, checked_key, join
from draftline.storage.retry import persist
from draftline.storage.s3_client import S3Limits, make_client, make_transfers
from draftline.storage.s3_errors import client_error, is_absent, lost_condition, passes, store_failure
from draftline.storage.store import Conflict, Damaged, DiskFull, NotFound, Stored, StoreFailed, probe

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_DELETED_AT_ONCE = 1000  # S3's own limit
_SHA256 = "sha256"  # what the object's metadata calls it
_WRITER = "writer"


class S3Store:
    """Objects are those below a prefix of a bucket. Its client is made at first use, anew wherever it is unpickled."""

    def __init__(self, place: S3Place, limits: S3Limits | None = None) -> None:
        self.url = place.url
        self._place = place
        self._limits = limits or S3Limits()
        self._client: Any = None
        self._client_lock = threading.Lock()

    def __reduce__(self) -> tuple[type[S3Store], tuple[S3Place, S3Limits]]:
        return S3Store, (self._place, self._limits)

    @property
    def folder(self) -> None:
        """A bucket is no folder."""
        return None

    @property
    def place(self) -> S3Place:
        """The bucket and the prefix."""
        return self._place

    @property
    def limits(self) -> S3Limits:
        """How it is used."""
        return self._limits

    def client(self) -> Any:
        """The boto3 client. Raises InputError for settings that make none."""
        with self._client_lock:
            if self._client is None:
                self._client = make_client(self._limits)
            return self._client

    def read(self, key: str) -> Stored:
        """See ArtifactStore."""
        body = _Body(self, key)
        data = b"".join(self._chunks(body))
        return Stored(data, body.version)

    def write(self, key: str, data: bytes) -> str:
        """See ArtifactStore."""
        return str(self._try(key, lambda client: client.put_object(**self._put(key, data)))["ETag"])

    def write_if(self, key: str, data: bytes, version: str | None) -> str:
        """See ArtifactStore."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        writer = uuid.uuid4().hex
        put = self._put(key, data, **{_WRITER: writer}) | condition

        def attempt(client: Any) -> str:
            try:
                return str(client.put_object(**put)["ETag"])
            except client.exceptions.ClientError as error:
                if not lost_condition(error):
                    raise
                # An earlier try may have won and lost only its answer: then the object is this writer's.
                found = self._head(client, key)
                if found is None or found["Metadata"].get(_WRITER) != writer:
                    raise Conflict(f"{self._url(key)} was written by another process meanwhile") from error
                return str(found["ETag"])

        return self._try(key, attempt)

    def upload(self, file: Path, key: str) -> str:
        """See ArtifactStore."""
        try:
            sums = _sums(file, self._limits)
            self._send(file, key, sums)
        except OSError as error:
            raise StoreFailed(f"cannot read {file}: {error.strerror or error}") from error
        found = self._try(key, lambda client: self._head(client, key))
        if found is None or found["ContentLength"] != sums.size or not self._holds(key, found, sums):
            raise Damaged(f"{self._url(key)} does not hold what {file} held; did another process write one of them?")
        return sums.sha256

    def download(self, key: str, file: Path, sha256: str) -> None:
        """See ArtifactStore."""
        for last in (False, True):  # bytes that were damaged on their way are right the second time
            try:
                with atomic_path(file) as temporary:
                    self._receive(key, temporary)
                    if (found := sha256_file(temporary)) != sha256:
                        raise Damaged(f"{self._url(key)} is damaged: its sha256 is {found}, not {sha256}")
                return
            except Damaged:
                if last:
                    raise
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFull(f"cannot write {file}: the disk or the quota is full; make room") from error
                raise StoreFailed(f"cannot write {file}: {error.strerror or error}") from error

    def sha256(self, key: str) -> str:
        """See ArtifactStore."""
        digest = hashlib.sha256()
        for chunk in self._chunks(_Body(self, key)):
            digest.update(chunk)
        return digest.hexdigest()

    def noted_sha256(self, key: str) -> str | None:
        """See ArtifactStore."""
        found = self._try(key, lambda client: self._head(client, key))
        return None if found is None else found["Metadata"].get(_SHA256)

    def keys(self, prefix: str) -> list[str]:
        """See ArtifactStore. Names that end in a slash are other programs' signs of a folder: left out."""
        start = below(self._place.prefix)
        wanted = {"Bucket": self._place.bucket, "Prefix": start + below(prefix)}

        def attempt(client: Any) -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(**wanted)
            return [each["Key"] for page in pages for each in page.get("Contents", ())]

        return sorted(name.removeprefix(start) for name in self._try(prefix, attempt) if not name.endswith("/"))

    def delete(self, keys: Sequence[str]) -> None:
        """See ArtifactStore."""
        names = [self._name(key) for key in keys]
        for first in range(0, len(names), _DELETED_AT_ONCE):
            self._try("", functools.partial(self._delete, names[first : first + _DELETED_AT_ONCE]))

    def check(self) -> None:
        """See ArtifactStore."""
        try:
            probe(S3Store(self._place, self._limits.hasty()))
        except RunFailed as error:
            raise InputError(f"store: {error}") from error

    def _delete(self, names: list[str], client: Any) -> None:
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        refused = client.delete_objects(Bucket=self._place.bucket, Delete=wanted).get("Errors")
        if refused:
            raise client_error(refused[0], "DeleteObjects")

    def _send(self, file: Path, key: str, sums: _Sums) -> None:
        extra = {"ChecksumAlgorithm": "SHA256", "Metadata": {_SHA256: sums.sha256}}

        def attempt(client: Any) -> None:
            with make_transfers(client, self._limits, sums.part_bytes) as transfers:
                transfers.upload(str(file), self._place.bucket, self._name(key), extra_args=extra).result()

        self._try(key, attempt)

    def _receive(self, key: str, file: Path) -> None:
        def attempt(client: Any) -> None:
            with make_transfers(client, self._limits, self._limits.part_bytes) as transfers:
                transfers.download(self._place.bucket, self._name(key), str(file)).result()

        self._try(key, attempt)

    def _holds(self, key: str, found: Any, sums: _Sums) -> bool:
        """Whether the store's own checksum is the file's; where it has none, its bytes are read back."""
        if reported := found.get("ChecksumSHA256"):
            return reported.partition("-")[0] in sums.checksums  # S3 adds the number of parts, others may not
        return self.sha256(key) == sums.sha256

    def _head(self, client: Any, key: str) -> Any:
        try:
            return client.head_object(Bucket=self._place.bucket, Key=self._name(key), ChecksumMode="ENABLED")
        except client.exceptions.ClientError as error:
            if is_absent(error):
                return None
            raise

    def _put(self, key: str, data: bytes, **metadata: str) -> dict[str, Any]:
        noted = {_SHA256: hashlib.sha256(data).hexdigest(), **metadata}
        where = {"Bucket": self._place.bucket, "Key": self._name(key)}
        return {**where, "Body": data, "ChecksumAlgorithm": "SHA256", "Metadata": noted}

    def _name(self, key: str) -> str:
        return join(self._place.prefix, checked_key(key))

    def _url(self, key: str) -> str:
        return join(self.url, key)

    def _chunks(self, body: _Body) -> Iterator[bytes]:
        while chunk := self._try(body.key, body.next_chunk):
            yield chunk

    def _try(self, key: str, attempt: Callable[[Any], T]) -> T:
        """What `attempt(client)` returns; waits for what passes, and turns boto3's errors into the store's."""
        client = self.client()
        try:
            return persist(lambda: attempt(client), passes, self._limits.patience_s)
        except RunFailed:
            raise
        except Exception as error:
            if is_absent(error):
                raise NotFound(f"{self.url} has no object {key!r}") from error
            failure = store_failure(error, self._url(key), client.meta.endpoint_url, self._limits.patience_s)
            if failure is None:
                raise
            raise failure from error


class _Body:
    """An object's bytes, chunk by chunk; after a broken connection the next try goes on where it broke."""

    def __init__(self, store: S3Store, key: str) -> None:
        self.key = key
        self.version = ""
        self._where = {"Bucket": store.place.bucket, "Key": join(store.place.prefix, checked_key(key))}
        self._stream: Any = None
        self._done = 0

    def next_chunk(self, client: Any) -> bytes:
        """The next chunk; empty at the end."""
        try:
            if self._stream is None:
                self._open(client)
            chunk: bytes = self._stream.read(_CHUNK_BYTES)
        except Exception:
            self._stream = None
            raise
        self._done += len(chunk)
        return chunk

    def _open(self, client: Any) -> None:
        # The rest must be of the same object: another writer's bytes would make a hash of neither.
        rest = {"Range": f"bytes={self._done}-", "IfMatch": self.version} if self._done else {}
        answer = client.get_object(**self._where, **rest)
        self.version, self._stream = str(answer["ETag"]), answer["Body"]


@dataclass(frozen=True, slots=True)
class _Sums:
    """A file's size in bytes, that of the parts it is sent in, its sha256 (hex), and what S3 may report of it: base64
    of the sha256 of its bytes, or of its parts' sha256."""

    size: int
    part_bytes: int
    sha256: str
    checksums: tuple[str, str]


def _sums(file: Path, limits: S3Limits) -> _Sums:
    size = file.stat().st_size
    part_bytes = limits.part_bytes_for(size)
    whole, of_parts = hashlib.sha256(), hashlib.sha256()
    with file.open("rb") as source:
        for start in range(0, size, part_bytes):
            part, end = hashlib.sha256(), min(size, start + part_bytes)
            while chunk := source.read(min(_CHUNK_BYTES, end - source.tell())):
                whole.update(chunk)
                part.update(chunk)
            of_parts.update(part.digest())
    checksums = (_base64(whole.digest()), _base64(of_parts.digest()))
    return _Sums(size, part_bytes, whole.hexdigest(), checksums)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
