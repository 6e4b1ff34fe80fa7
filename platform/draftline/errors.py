"""The one error that is the user's to mend."""

from __future__ import annotations


class InputError(Exception):
    """Bad input: the message names the file, key or line, what was found and what is allowed. Exit status 2."""
