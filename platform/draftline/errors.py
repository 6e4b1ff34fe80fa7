"""The errors that end a run with one message rather than with a traceback."""

from __future__ import annotations


class InputError(Exception):
    """Bad input: the message names the file, key or line, what was found and what is allowed. Exit status 2."""


class RunFailed(RuntimeError):
    """The run cannot go on, or must not: a check did not hold, or a part is gone. The message says the numbers."""


class BudgetSpent(RunFailed):
    """A part was lost more often than the recipe's `failures` allow. Decided: nobody above tries again."""
