"""The store for real: a Mooncake master over loopback, a replica's writer in its own process, a reader here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from draftline.hidden_states.capacity import StatesShape
from draftline.hidden_states.master import MasterProcess
from draftline.hidden_states.store import StatesLost, StatesReader, StoreClient, StoreConfig, quiet_environment

SHAPE = StatesShape(layers=3, hidden_size=64, item_bytes=4)
SEGMENT_BYTES = 64 << 20
WRITER = Path(__file__).parent.parent / "states_writer.py"


class Writer:
    """A process that writes states with hs-connectors' store, as a replica's connector does."""

    def __init__(self, config: StoreConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WRITER), json.dumps(config.connector_config())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | quiet_environment(),
        )
        assert self._reply() == "ready"

    def put(self, key: str, tokens: int, error: str = "") -> dict[str, Any]:
        """Writes a sample of so many tokens, or an error marker; returns its manifest."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([key, tokens, error]) + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        if isinstance(reply, str):
            raise RuntimeError(reply)
        return reply

    def put_in_the_end(self, key: str, tokens: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """Writes a sample while the store refuses some puts; each try has its own key."""
        deadline = time.monotonic() + timeout_s
        for number in itertools.count():
            try:
                return self.put(f"{key}-{number}", tokens)
            except RuntimeError:
                assert time.monotonic() < deadline
                time.sleep(0.3)
        raise AssertionError

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    process = MasterProcess(tmp_path_factory.mktemp("master") / "master.log", "127.0.0.1")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def config(master: MasterProcess) -> StoreConfig:
    return StoreConfig(master.start(), segment_bytes=SEGMENT_BYTES, buffer_bytes=16 << 20)


@pytest.fixture(scope="module")
def writer(config: StoreConfig) -> Iterator[Writer]:
    process = Writer(config)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def reader(config: StoreConfig) -> Iterator[StatesReader]:
    reader = StatesReader(config)
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def client(config: StoreConfig) -> Iterator[StoreClient]:
    client = StoreClient(config)
    yield client
    client.close()


def test_states_come_back_as_they_were_written(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("sample-1", 10)
    assert manifest["metadata"]["total_aligned_bytes"] == SHAPE.sample_bytes(10)
    states = reader.read(manifest, timeout_s=5.0, expected_token_ids=range(10))
    assert states["hidden_states"].shape == (10, 3, 64) and states["hidden_states"].dtype == torch.float32
    assert torch.equal(states["hidden_states"].flatten(), torch.arange(10 * 3 * 64, dtype=torch.float32))
    with pytest.raises(StatesLost, match="other token ids"):
        reader.read(manifest, timeout_s=5.0, expected_token_ids=[1, 2, 3])
    client.delete(["sample-1"])


def test_deleted_states_are_lost(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("sample-2", 5)
    reader.read(manifest, timeout_s=5.0)  # the lease that this grants does not keep it from being deleted
    assert client.missing(["sample-2", "never"]) == ["never"]
    client.delete(["sample-2", "never"])
    began = time.monotonic()
    with pytest.raises(StatesLost, match=r"sample-2 are lost: not found within 0\.3 s"):
        reader.read(manifest, timeout_s=0.3)
    assert time.monotonic() - began < 2.0


def test_the_producers_error_is_told(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("sample-3", 5, error="tensor holds 7 NaN")
    assert client.missing(["sample-3"]) == []
    with pytest.raises(StatesLost, match="tensor holds 7 NaN"):
        reader.read(manifest, timeout_s=5.0)
    reader.delete("sample-3")
    assert client.missing(["sample-3"]) == ["sample-3"]


def test_a_full_store_refuses_and_evicts_nothing(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    tokens = 2000  # 1.5 MiB
    written = {}
    with pytest.raises(RuntimeError, match=r"status=-200"):
        for number in range(100):
            written[f"full-{number}"] = writer.put(f"full-{number}", tokens)
    assert len(written) * SHAPE.sample_bytes(tokens) > 0.85 * SEGMENT_BYTES
    time.sleep(0.2)
    assert client.missing(list(written)) == []
    client.delete(list(written))
    reader.read(writer.put("after", tokens), timeout_s=5.0)
    reader.delete("after")


def test_states_of_a_dead_writer_are_lost_at_once(config: StoreConfig, reader: StatesReader) -> None:
    second = Writer(config)
    manifests = [second.put(f"second-{number}", 5) for number in range(12)]  # spread over both segments
    second.kill()
    began = time.monotonic()
    lost = 0
    for manifest in manifests:
        try:
            reader.read(manifest, timeout_s=30.0)
        except StatesLost:
            lost += 1
        reader.delete(manifest["handle"])
    assert lost > 0 and time.monotonic() - began < 10.0


def test_a_master_that_died_comes_back_at_its_address(
    master: MasterProcess, writer: Writer, reader: StatesReader, client: StoreClient
) -> None:
    manifest = writer.put_in_the_end("before", 5)  # the dead writer's segment may still be among those to put to
    assert master.pid is not None
    psutil.Process(master.pid).kill()
    while master.running():
        time.sleep(0.01)
    master.start()
    with pytest.raises(StatesLost):
        reader.read(manifest, timeout_s=3.0)
    manifest = writer.put_in_the_end("after", 5)  # the writer offers its segment again within a second or so
    assert reader.read(manifest, timeout_s=5.0)["token_ids"].tolist() == list(range(5))


def test_two_masters_do_not_share_ports(master: MasterProcess, config: StoreConfig, tmp_path: Path) -> None:
    second = MasterProcess(tmp_path / "second.log", "127.0.0.1")
    taken = int(config.master_address.rpartition(":")[2])
    second._ports = (taken, taken + 1)
    with pytest.raises(RuntimeError, match="does not start"):
        second.start()
    second._ports = None
    assert second.start() != config.master_address
    second.stop()
    assert not second.running()
