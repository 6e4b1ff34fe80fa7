"""The checks of the machine: memory and ports."""

import socket

import pytest

from draftline.cluster.memory import MemoryWatch, pss_bytes
from draftline.cluster.preflight import available_memory_bytes, require_free_port, require_memory
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


def test_too_little_memory_says_what_needs_how_much() -> None:
    require_memory(1 << 20, "the run")
    with pytest.raises(InputError, match=r"too little memory: the run needs about .* GiB, and .* GiB is free"):
        require_memory(available_memory_bytes() * 2, "the run")
    with pytest.raises(InputError, match=r"memory_limit_bytes is 1\.0 GiB, but the run needs about 2\.0 GiB"):
        require_memory(2 << 30, "the run", limit_bytes=1 << 30)


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
