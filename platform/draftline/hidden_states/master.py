"""The Mooncake master of a run: a child process that an actor owns, restarts and ends."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import socket
import time
from pathlib import Path

import psutil
import ray

from draftline.cluster.processes import ChildProcess, ChildProcessFailed

START_TRIES = 5
# How often wanted ports are tried, and the pause between: who had them before may be about to end.
WANTED_TRIES, WANTED_PAUSE_S = 3, 1.0
START_WAIT_S = 15.0
# Above the range that Ray gives to its workers.
LOWEST_PORT, PORT_TRIES = 20000, 20
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Longer than any wait of a reader: a lease that ends makes an object evictable.
LEASE_S = 24 * 3600
# After so long without a sign of life a client's segment is taken as lost; until then puts may still go there and fail.
CLIENT_TTL_S = 10


class MasterProcess:
    """The master's process on this machine. It listens on `host`, at ports that are its alone."""

    def __init__(self, log_file: Path, host: str) -> None:
        self._log_file = log_file
        self._host = host
        self._ports: tuple[int, int] | None = None
        self._child: ChildProcess | None = None

    def start(self, wanted: tuple[int, int] | None = None) -> str:
        """Starts the master and returns its address, `host:port`, once it answers. Raises ChildProcessFailed.

        One that has run before gets its ports again or does not start; otherwise `wanted` (RPC, metrics) are tried
        first, then free ones.
        """
        problem = ""
        for attempt in range(START_TRIES):
            if attempt and wanted:
                time.sleep(WANTED_PAUSE_S)
            ports = self._ports or (wanted if attempt < WANTED_TRIES else None) or self._free_ports()
            self._child = ChildProcess(self._command(*ports), log_file=self._log_file)
            if _owns_ports(self._child, ports):
                self._ports = ports
                return self.address
            problem = self._child.log_tail() or f"it does not listen on its ports {ports}"
            self._child.stop()
        raise ChildProcessFailed(f"the Mooncake master does not start ({START_TRIES} tries); its log ends:\n{problem}")

    @property
    def ports(self) -> tuple[int, int]:
        """RPC and metrics port. RuntimeError before the first start."""
        if self._ports is None:
            raise RuntimeError("the Mooncake master was never started: it has no ports yet")
        return self._ports

    @property
    def address(self) -> str:
        """What clients join: `host:port`. RuntimeError before the first start."""
        return f"{self._host}:{self.ports[0]}"

    @property
    def pid(self) -> int | None:
        """Process id, none before the start and after the end."""
        return None if self._child is None else self._child.pid

    def running(self) -> bool:
        """True while the process lives."""
        return self._child is not None and self._child.poll() is None

    def stop(self) -> None:
        """Ends the process."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _free_ports(self) -> tuple[int, int]:
        return _free_port(self._host), _free_port("127.0.0.1")

    def _command(self, rpc_port: int, metrics_port: int) -> list[str]:
        flags = {
            "rpc_address": self._host,
            "rpc_port": rpc_port,
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics_port,
            "default_kv_lease_ttl": f"{LEASE_S}s",
            "client_ttl": CLIENT_TTL_S,
            # Nothing is ever evicted: what is stored is wanted. A full store refuses loudly instead.
            "eviction_high_watermark_ratio": "1.0",
            "eviction_ratio": "0.0",
            "logtostderr": "true",
            "minloglevel": 1,
        }
        return [str(_binary()), *(f"-{name}={value}" for name, value in flags.items())]


@ray.remote(num_cpus=0, max_restarts=0)
class MooncakeMaster:
    """The actor around the master's process, on the node where Ray puts it; its log goes to `log_folder`."""

    def __init__(self, log_folder: str) -> None:
        self._process = MasterProcess(Path(log_folder) / "mooncake_master.log", ray.util.get_node_ip_address())
        self._restarts = 0

    def start(self, ports: tuple[int, int] | None = None) -> str:
        """Starts the master, at `ports` (RPC, metrics) when they are to be had; returns its address, `ip:port`.

        The ports of a master that is gone spare its clients the way to a new address.
        """
        return self._process.start(ports)

    def ports(self) -> tuple[int, int]:
        """RPC and metrics port of the started master."""
        return self._process.ports

    def address(self) -> str:
        """Address of the started master, `ip:port`."""
        return self._process.address

    def ensure(self) -> int:
        """Starts the master again, at the same address, if it has died. Returns how often that happened.

        After a restart the clients join again by themselves, but all that was stored is lost.
        """
        if not self._process.running():
            self._process.start()
            self._restarts += 1
        return self._restarts

    def process_id(self) -> int | None:
        """Process id of the master."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the master."""
        self._process.stop()


def _binary() -> Path:
    package = importlib.util.find_spec("mooncake")
    if package is None or package.origin is None:
        raise ChildProcessFailed("the package mooncake is not installed")
    return Path(package.origin).parent / "mooncake_master"


def _free_port(host: str) -> int:
    """A port that nobody has now. A restart wants it again, so it is none that the system gives to connections."""
    first_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0]) if _EPHEMERAL_PORTS.exists() else 0
    below = range(LOWEST_PORT, first_ephemeral)
    for port in (*random.sample(below, min(PORT_TRIES, len(below))), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise ChildProcessFailed(f"the Mooncake master does not start: {host} has no free port")


def _owns_ports(child: ChildProcess, ports: tuple[int, int]) -> bool:
    """Waits until the child, and nobody else, listens on the ports. False when it ends or does not within the wait.

    A port that looked free may be taken by now, and a master whose RPC port is taken stays up without it.
    """
    deadline = time.monotonic() + START_WAIT_S
    while time.monotonic() < deadline and child.poll() is None:
        listeners = {
            (connection.laddr.port, connection.pid)
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port in ports
        }
        if {port for port, _ in listeners} == set(ports):
            return all(pid == child.pid for _, pid in listeners)
        time.sleep(0.02)
    return False
