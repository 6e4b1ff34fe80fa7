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
                used = int(used_file.read_text()) - _reclaimable_bytes(used_file.parent / "memory.stat")
                free = min(free, max(0, int(limit) - used))
    return free


def _reclaimable_bytes(file: Path) -> int:
    """File cache that a container counts as used and gives back when asked, such as what an installation has read."""
    lines = file.read_text().splitlines() if file.is_file() else []
    figures = dict(line.split(maxsplit=1) for line in lines)
    return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))  # the first also counts sub-groups


def require_free_port(host: str, port: int, key: str) -> None:
    """Raises InputError, naming the recipe's `key`, when nobody can listen on `host:port`. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's leftover is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"{key}: port {port} on {host} cannot be used ({error.strerror}); free it, or name another (0: any)"
            ) from error
        except (TypeError, ValueError) as error:  # a zero byte, or what no host's name can be
            raise InputError(f"{key}: found the host {host!r}; allowed: an address or a host's name") from error
