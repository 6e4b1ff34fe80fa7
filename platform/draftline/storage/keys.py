"""Keys of the artifact store and the URLs of its places; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftline.errors import InputError

ALLOWED = "a folder, or s3://BUCKET/PREFIX"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_LONGEST_KEY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket and the prefix in it, without a slash at either end."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return "s3://" + join(self.bucket, self.prefix)


def names_a_folder(store: str) -> bool:
    """Whether a recipe's `store` is a folder's path; what looks like a URL is none, were it one that nobody knows."""
    return bool(store.strip()) and "://" not in store and not store.lower().startswith(("s3:", "file:"))


def parse_s3_url(url: str) -> S3Place:
    """The place that `s3://bucket/prefix` names. Raises InputError."""
    rest = url.removeprefix("s3://")
    bucket, _, path = rest.partition("/")
    prefix = path.strip("/")
    if _BUCKET.fullmatch(bucket) and not re.search(r"[?#]", prefix) and not (prefix and key_problem(prefix)):
        return S3Place(bucket, prefix)
    if re.search(r"[@:%?#]", rest):  # perhaps a key and its secret, which may hold a slash: never to be repeated
        raise InputError(
            "store: found an s3:// URL with a user name, a password, a port or a query in it; allowed: "
            "s3://BUCKET/PREFIX, with the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) "
            "or in an AWS profile"
        )
    raise InputError(f"store: found {url!r}; allowed: s3://BUCKET/PREFIX, e.g. s3://my-bucket/draftline")


def join(*parts: str) -> str:
    """The parts that are not empty, with one slash between them."""
    return "/".join(part for part in parts if part)


def below(prefix: str) -> str:
    """What every key below the folder `prefix` starts with: the folder's name and a slash, or nothing for ''."""
    stripped = prefix.strip("/")
    return f"{stripped}/" if stripped else ""


def checked_key(key: str) -> str:
    """`key`. Raises ValueError for what no store takes."""
    if problem := key_problem(key):
        raise ValueError(f"{key!r} is no key of the artifact store: {problem}")
    return key


def key_problem(key: str) -> str | None:
    """Why a key is refused, by every store alike; None when it is fine.

    A key is a relative path with `/`: it must mean the same thing in a folder and in a bucket.
    """
    if not key:
        return "it is empty"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "it has an empty part, '.' or '..' between its slashes"
    if any(ord(character) < 32 or ord(character) == 127 or 0xD800 <= ord(character) < 0xE000 for character in key):
        return "it has a control character or half a character"
    if len(key.encode()) > _LONGEST_KEY_BYTES:
        return f"it has more than {_LONGEST_KEY_BYTES} bytes"
    if is_reserved(key):
        return "its name is reserved for files that are being written and for locks"
    return None


def is_reserved(key: str) -> bool:
    """Whether a name is one of a file that `atomic_path` has not finished, or of a lock: never an object."""
    name = key.rpartition("/")[2]
    return name.startswith(".") and name.endswith((".tmp", ".lock"))
