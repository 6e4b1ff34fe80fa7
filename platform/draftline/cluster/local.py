"""Starts a Ray head in this process or joins a running cluster, and ends what it started without leaving anything."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import draftline
from draftline.cluster.shared_memory import remove_abandoned
from draftline.errors import InputError
from draftline.storage.artifacts import was_uploaded

_HOST = r"(?:[\w.-]+|\[[\da-fA-F:.]+\])"
_ADDRESS = re.compile(rf"{_HOST}:\d+|https?://{_HOST}(:\d+)?(/[\w./-]*)?")
_PR_SET_CHILD_SUBREAPER = 36
_OBJECT_STORE_BYTES = 150 << 20  # nothing large goes through it: hidden states travel by Mooncake
_LEAST_LOGICAL_CPUS = 8  # Ray's CPUs only decide who may start; each actor sets its own threads

_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_process_group_cleanup_enabled": "1",  # an actor's children go with it
    "RAY_JOB_STOP_WAIT_TIME_S": "60",  # the driver saves a checkpoint and ends all in this time
    "RAY_prestart_worker_first_driver": "0",  # one idle worker per logical CPU would only take memory
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that takes jobs."""

    jobs_address: str
    """what a JobSubmissionClient connects to"""
    gcs_address: str | None
    """`host:port` that a driver on this machine connects to; None for a cluster elsewhere"""
    started_here: bool

    @property
    def local(self) -> bool:
        """Whether the cluster's head sees this machine's files."""
        return self.gcs_address is not None

    @property
    def name(self) -> str:
        """The address as messages repeat it, without a path: a proxy's may hold a token."""
        scheme, separator, rest = self.jobs_address.rpartition("://")
        return scheme + separator + rest.partition("/")[0]


@contextlib.contextmanager
def ray_cluster(address: str | None = None) -> Iterator[Cluster]:
    """A cluster to submit to: the one named by `address` or RAY_ADDRESS, else the one that `ray start` left on this
    machine, else a new head in this process, which ends with the block together with every process below it.

    Raises InputError for an address of another form.
    """
    address = running_cluster(address)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray's job client would rather follow these
        os.environ.pop(name, None)
    if address is not None:
        yield Cluster(address, on_this_machine(address), started_here=False)
        return
    began = time.time()
    _adopt_orphans()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        yield _start_head()
    finally:
        _end_head(before, began)


def running_cluster(address: str | None = None) -> str | None:
    """The address of the running cluster that `ray_cluster` would join; None: it would start one.

    Raises InputError for an address of another form, which it does not repeat: it may hold a password.
    """
    named = address or os.environ.get("RAY_ADDRESS")
    if named in ("auto", "local"):
        return None
    if named and not _ADDRESS.fullmatch(named):
        what = "--address" if address else "RAY_ADDRESS"
        raise InputError(
            f"{what}: found an address of another form (not repeated here, it may hold a password); allowed: "
            "HOST:PORT or http://HOST:PORT, without a user name or a password"
        )
    return named or _left_by_ray_start()


def worker_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """The runtime environment that a driver gives its workers: `variables`, and where they find the package.

    When it was sent along with the job, they import it from their own copy: driver and workers run the same code.
    """
    package_root = Path(draftline.__file__).resolve().parents[1]
    path = {"PYTHONPATH": package_root.name} if was_uploaded(package_root) else {}  # below a worker's working directory
    return {"env_vars": {**variables, **path}}


def _start_head() -> Cluster:
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    # Ray's remark on its token is true and of no use to the user: the token is made and found by itself.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    with _apart_from_terminal():
        context: Any = ray.init(
            address="local",
            num_cpus=max(_LEAST_LOGICAL_CPUS, os.cpu_count() or 1),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    address = context["address"]
    return Cluster(f"http://{context['webui_url']}", address, started_here=True)


@contextlib.contextmanager
def _apart_from_terminal() -> Iterator[None]:
    """Processes started in the block are a process group of their own.

    A terminal sends Ctrl-C to the whole group in front of it: Ray's dashboard would die of it, and with it the way to
    stop the job in peace.
    """
    if os.getpid() == os.getsid(0):  # a session's leader cannot change its group
        yield
        return
    before = os.getpgrp()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0) as founder:  # ends with the block
        os.setpgid(0, founder.pid)
        try:
            yield
        finally:
            os.setpgid(0, before)


def _end_head(before: set[int], began: float) -> None:
    """Ends Ray and whatever still runs below this process and did not before."""
    import ray

    with contextlib.suppress(KeyboardInterrupt):  # asked to hurry: the processes are ended below all the same
        ray.shutdown()
    end_descendants(keep=before, grace_s=10.0)
    remove_abandoned(began)


def end_descendants(*, keep: set[int], grace_s: float) -> None:
    """Waits for all processes below this one to end, except those in `keep`: SIGTERM and SIGKILL after the grace."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while left := [process for process in psutil.Process().children(recursive=True) if process.pid not in keep]:
        overdue = time.monotonic() > deadline
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if overdue and process.pid in asked:
                    process.kill()
                elif overdue:
                    asked.add(process.pid)
                    process.terminate()
        psutil.wait_procs(left, timeout=3.0 if overdue else 0.5)


def _adopt_orphans() -> None:
    # Processes below this one whose parent ends become children of this one, so that none is out of reach at the end.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _left_by_ray_start() -> str | None:
    from ray._common.utils import get_ray_address_file

    file = Path(get_ray_address_file(None))
    address = file.read_text().strip() if file.is_file() else ""
    return address if address and _answers(address) else None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


def on_this_machine(address: str) -> str | None:
    """`address` when it is the GCS address of a head on this machine: its jobs can read local files."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return None
    own = {"127.0.0.1", "localhost", socket.gethostname()}
    own.update(each.address for addresses in psutil.net_if_addrs().values() for each in addresses)
    return address if host in own else None
