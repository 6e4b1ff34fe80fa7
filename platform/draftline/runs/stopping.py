"""Turns a request to stop (SIGTERM, Ctrl-C) into an exception, so that every `finally` on the way out runs."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequested(BaseException):
    """Someone asked the run to stop. Not an Exception: handlers of errors let it pass."""


def install_stop_handlers() -> None:
    """SIGTERM and SIGINT raise StopRequested in the main thread, the first time; the way out is not interrupted again.

    Call it after `ray.init`, which installs handlers of its own. Works in the main thread only.
    """
    stopping = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise StopRequested(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def stop_behind(error: BaseException) -> StopRequested | None:
    """The request to stop that `error` is or comes from: out of Ray's compiled code it comes as a SystemError."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, StopRequested):
        seen = seen.__cause__ or seen.__context__
    return seen
