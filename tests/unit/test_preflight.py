"""The checks of the machine: memory and ports."""

import socket
from pathlib import Path

import pytest

from draftline.cluster import preflight
from draftline.cluster.memory import MemoryWatch, pss_bytes
from draftline.cluster.preflight import require_free_port
from draftline.errors import InputError


def test_a_port_in_use_is_named_with_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"serving\.port: port {port} on 127\.0\.0\.1 cannot be used"):
            require_free_port("127.0.0.1", port, "serving.port")
    require_free_port("127.0.0.1", port, "serving.port")
    require_free_port("127.0.0.1", 0, "serving.port")


@pytest.mark.parametrize("host", ["a\0b", "a..b", "x" * 70])
def test_a_host_that_none_can_be_is_named(host: str) -> None:
    with pytest.raises(InputError, match=r"^serving\.port: .*; (allowed: an address|free it)"):
        require_free_port(host, 0, "serving.port")


def test_file_cache_that_a_container_gives_back_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    values = {"max": gib, "current": gib, "memory.stat": f"anon 1\ninactive_file {gib // 2}"}
    for name, value in values.items():
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(preflight, "_CGROUP_FILES", ((tmp_path / "max", tmp_path / "current"),))
    assert preflight.available_memory_bytes() == gib // 2


def test_memory_watch_keeps_the_peak() -> None:
    with MemoryWatch("/no/such/session", every_s=0.02) as watch:
        before = watch.sample()
        block = bytearray(b"x" * (64 << 20))
        held = watch.sample()
        del block
        after = watch.sample()
    assert held - before > 60 << 20
    assert after < held <= watch.peak_bytes


def test_an_ended_process_uses_nothing() -> None:
    assert pss_bytes(2**22 + 1) == 0
