"""The errors that end a run with one message rather than with a traceback, and how to read those of others."""

from __future__ import annotations

from collections.abc import Iterator


class InputError(Exception):
    """Bad input: the message names the file, key or line, what was found and what is allowed. Exit status 2."""


class RunFailed(RuntimeError):
    """The run cannot go on, or must not: a check did not hold, or a part is gone. The message says the numbers."""


class BudgetSpent(RunFailed):
    """A part was lost more often than the recipe's `failures` allow. Decided: nobody above tries again."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what Ray or Ray Train wrapped in it, and what it was raised from; outermost first."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        failures = getattr(each, "worker_failures", None)
        waiting += list(failures.values()) if isinstance(failures, dict) else []
        waiting += [getattr(each, name, None) for name in ("controller_failure", "_base_exc", "cause")]
        waiting += [each.__cause__, each.__context__]


def one_line(error: BaseException) -> str:
    """Type and message of an error, without the traceback that Ray puts into the text of an actor's error."""
    inner = getattr(error, "cause", None) or error
    lines = str(inner).strip().splitlines() or [""]
    # What Ray says of a dead actor starts with the reason; a task's error ends with it.
    line = lines[0] if type(inner).__module__.startswith("ray.") else lines[-1]
    return f"{type(inner).__name__}: {line}".rstrip(": ")
