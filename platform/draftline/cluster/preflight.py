"""Checks of the machine before a run writes anything: memory and ports."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from draftline.errors import InputError

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_memory_bytes() -> int:
    """Memory that this machine, or the container that limits it, can still give."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in _CGROUP_FILES:
        if limit_file.is_file() and used_file.is_file():
            limit = limit_file.read_text().strip()
            if limit.isdigit() and int(limit) < psutil.virtual_memory().total:
                free = min(free, max(0, int(limit) - int(used_file.read_text())))
    return free


def require_memory(needed_bytes: int, what: str, *, limit_bytes: int | None = None) -> None:
    """Raises InputError when `needed_bytes` for `what` exceed the recipe's limit or what the machine has free."""
    if limit_bytes is not None and needed_bytes > limit_bytes:
        raise InputError(
            f"resources.memory_limit_bytes is {_gib(limit_bytes)}, but {what} needs about {_gib(needed_bytes)}"
        )
    free = available_memory_bytes()
    if needed_bytes > free:
        raise InputError(f"too little memory: {what} needs about {_gib(needed_bytes)}, and {_gib(free)} is free")


def require_free_port(host: str, port: int, key: str) -> None:
    """Raises InputError, naming the recipe's `key`, when nobody can listen on `host:port`. Port 0 is always free."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's leftover is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"{key}: port {port} on {host} cannot be used ({error.strerror}); free it, or name another (0: any)"
            ) from error


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
