"""The HTTP port that Serve will listen on: free, or refused before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from draftline.errors import InputError


@contextmanager
def hold_port(host: str, port: int) -> Iterator[int]:
    """Holds `port` (0: any free one) until the block ends and yields its number.

    Raises InputError when the port is in use or forbidden, or when the machine has no address `host`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        # Connections that are only waiting out their time do not make a port busy; a listener does.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
            held.listen(1)
        except OSError as error:
            raise InputError(_refusal(host, port, error)) from None
        yield held.getsockname()[1]


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"serving.port: {port} is in use on {host}; name a free port, or 0 for any"
    if error.errno == errno.EACCES:
        return f"serving.port: {port} may not be opened by this user; name a port from 1024 to 65535, or 0 for any"
    return f"serving.host: {host!r} is no address of this machine ({error.strerror or error})"
