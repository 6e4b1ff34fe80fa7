"""Watches the memory of a run's processes on this machine and keeps the peak."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import psutil


class MemoryWatch:
    """Samples the memory of this process and of the local Ray node (all processes below it) until it is stopped.

    The unit is PSS: a page that several processes share counts once. `session_dir` is Ray's session folder, as
    `ray.init(...).address_info["session_dir"]` names it; it tells this node's processes from another's.
    """

    def __init__(self, session_dir: str | Path, *, every_s: float = 3.0) -> None:
        self._session_dir = str(session_dir)
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    def sample(self) -> int:
        """Bytes in use now; also raises the peak."""
        used = sum(pss_bytes(pid) for pid in run_processes(self._session_dir))
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def _watch(self) -> None:
        while True:
            self.sample()
            if self._over.wait(self._every_s):
                return


def run_processes(session_dir: str) -> set[int]:
    """Process ids of this process, of the Ray node of `session_dir`, and of all processes below them."""
    parents: dict[int, int] = {}
    found = {os.getpid()}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            parents[process.pid] = process.ppid()
            if any(session_dir in argument for argument in process.cmdline()):
                found.add(process.pid)
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    open_ends = list(found)
    while open_ends:
        below = [pid for pid in children.get(open_ends.pop(), []) if pid not in found]
        found.update(below)
        open_ends.extend(below)
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process in bytes: shared pages divided by their users. 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
        return 0
    except PermissionError:  # another user's process: its resident size is the best that can be said
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(psutil.Process(pid).memory_info().rss)
        return 0
    except (FileNotFoundError, ProcessLookupError):
        return 0
