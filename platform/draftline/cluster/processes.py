"""The one place that starts child processes: each has its own group and log file, and dies with its parent."""

from __future__ import annotations

import collections
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from draftline.errors import RunFailed

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ChildProcessFailed(RunFailed):
    """A child process could not start or ended when it should not have; the message carries the tail of its log."""


@cache
def _starter() -> ThreadPoolExecutor:
    # The kernel sends the death signal when the *thread* that forked ends, so children are started from one thread
    # that lives as long as this process.
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-starter")


def _dies_with(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died between fork and prctl: no signal will come
                os._exit(1)

    return before_exec


class ChildProcess:
    """A running child: its output goes to `log_file` (appended), its process group is its own.

    `env` is the child's whole environment; none means this process's. Raises ChildProcessFailed when the program
    cannot be started. Usable as a context manager, which stops the child at the end.
    """

    def __init__(self, args: Sequence[str], *, log_file: Path, env: Mapping[str, str] | None = None) -> None:
        self.args = [str(arg) for arg in args]
        self.log_file = log_file
        self._stopped: int | None = None
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        try:
            self._process = _starter().submit(self._start, dict(os.environ if env is None else env)).result()
        except OSError as error:
            raise ChildProcessFailed(f"cannot start {self.args[0]}: {error}") from error

    def _start(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                self.args,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,
                preexec_fn=_dies_with(os.getpid()),
            )

    @property
    def pid(self) -> int:
        """Process id, also the id of the child's process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while the child runs (negative: ended by that signal)."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status once the child has ended; raises TimeoutError after `timeout_s` seconds."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.args[0]} (process {self.pid}) still runs after {timeout_s} s") from error

    def require_running(self) -> None:
        """Raises ChildProcessFailed, with the end of the log, when the child has ended."""
        if (status := self.poll()) is not None:
            raise ChildProcessFailed(
                f"{self.args[0]} (process {self.pid}) ended with status {status}; end of {self.log_file}:\n"
                f"{self.log_tail() or '(nothing logged)'}"
            )

    def stop(self, grace_s: float = 5.0) -> int:
        """Ends the child and its group: SIGTERM, after `grace_s` seconds SIGKILL. Returns the exit status."""
        if self._stopped is not None:  # the group's number may belong to others by now
            return self._stopped
        self._signal(signal.SIGTERM)
        try:
            status = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            status = self._process.wait()
        self._signal(signal.SIGKILL)  # what is left of the group when its leader has ended
        self._stopped = status
        return status

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # the group is gone, or holds only zombies
            return

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this child (not an earlier one with the same log file) wrote."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            last = collections.deque(log, maxlen=lines)
        return b"".join(last).decode(errors="replace").rstrip()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()
