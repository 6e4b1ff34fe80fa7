"""What a run may leave behind, seen from outside: processes, listening ports, shared-memory segments."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def wait_for(file: Path, text: str, limit_s: float = 60.0) -> str:
    deadline = time.monotonic() + limit_s
    while text not in file.read_text():
        assert time.monotonic() < deadline, f"{text!r} never came up in:\n{file.read_text()}"
        time.sleep(0.1)
    return file.read_text()


def listening() -> set[tuple[int, int | None]]:
    """(port, process id) of every TCP socket that listens on this machine."""
    connections = psutil.net_connections("tcp")
    return {(c.laddr.port, c.pid) for c in connections if c.status == psutil.CONN_LISTEN}


def abandoned_segments() -> set[str]:
    """Shared-memory segments that no living process maps."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" not in mapped}


def family(pid: int) -> set[int]:
    return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes a child of this one (Linux): none gets away."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def survivors(before: set[int]) -> dict[int, str]:
    """Living processes below this one that are not in `before`: command line by process id. Buries the dead ones."""
    living = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                living[child.pid] = " ".join(child.cmdline()) or child.name()
            elif child.ppid() == os.getpid() and child.pid not in before:
                os.waitpid(child.pid, os.WNOHANG)
    return {pid: title for pid, title in living.items() if pid not in before}
