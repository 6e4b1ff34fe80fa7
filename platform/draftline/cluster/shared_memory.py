"""Removes what killed engines leave in shared memory: OpenMP's registrations and the queues between vLLM's processes.

Both are deleted on an orderly exit only, and engines are often killed by whoever owns them.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_REGISTRATION = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")  # by process id
_SHARED = ("psm_*", "sem.mp-*")  # the names that Python's multiprocessing gives to segments and semaphores


def remove_abandoned(since: float, folder: Path = SHARED_MEMORY) -> list[str]:
    """Deletes registrations of dead processes, and this user's queues and semaphores that no living process maps and
    that were made after `since` (seconds since the epoch: when the caller began). Returns their names.
    """
    abandoned = [file for file in folder.glob("__KMP_REGISTERED_LIB_*") if _is_of_the_dead(file.name)]
    mapped = _mapped_files()
    for file in (file for pattern in _SHARED for file in folder.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            about = file.stat()
            if about.st_uid == os.getuid() and about.st_ctime >= since and str(file) not in mapped:
                abandoned.append(file)
    removed = []
    for file in abandoned:
        # Another user's, or gone by now: neither is ours to mend.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            file.unlink()
            removed.append(file.name)
    return sorted(removed)


def _is_of_the_dead(name: str) -> bool:
    match = _REGISTRATION.fullmatch(name)
    return match is not None and not psutil.pid_exists(int(match[1]))


def _mapped_files() -> str:
    """The memory maps of all processes that may be looked at, as one text."""
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            maps.append(file.read_text())
    return "".join(maps)
