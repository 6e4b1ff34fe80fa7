"""Files that are whole or absent, their checksums, and paths that a user named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from draftline.errors import InputError


def sha256_file(path: Path) -> str:
    """Hex sha256 of one file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_tree(folder: Path) -> dict[str, str]:
    """Hex sha256 of every file below `folder`, by path relative to it (with `/`), sorted. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; it becomes `path` when the block ends well and is removed when it does not.

    The content is on disk before the name changes, so a reader (or a machine that lost power) sees the old file or
    the new one, never a part. Makes the folder when it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp's 0600 would hide the file from a group that shares the store
        _flush_to_disk(temporary)
        temporary.replace(path)
        _flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Writes UTF-8 text whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes JSON, indented for people, whole or not at all. Raises TypeError for what JSON cannot hold."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def user_path(base: Path, value: str, label: str) -> Path:
    """A path that a user wrote, below `base` unless absolute, `~` expanded; it need not exist.

    Raises InputError, which begins with `label`, for what no file system can hold.
    """
    try:
        path = base / Path(value).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()
        return path
    except RuntimeError:
        reason = "there is no such user"
    except ValueError:
        reason = "it has a zero byte or half a character"
    except OSError as error:
        reason = error.strerror or str(error)
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    raise InputError(f"{label}: found {shown!r}; allowed: a path ({reason})")


def open_user_file(path: Path, allowed: str) -> BinaryIO:
    """Opens a file that a user named. Raises InputError when it is missing, no file, or not to be read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.open("rb")
        found = "found a folder" if stat.S_ISDIR(mode) else "found neither a file nor a folder"
    except FileNotFoundError:
        found = "no such file"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    raise InputError(f"{path}: {found}; allowed: {allowed}")


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
