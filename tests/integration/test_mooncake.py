"""The store for real: a Mooncake master over loopback, a replica's writer in its own process, a reader here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from draftline.hidden_states.capacity import StatesShape
from draftline.hidden_states.master import MasterProcess
from draftline.hidden_states.store import (
    StatesLost,
    StatesReader,
    StoreClient,
    StoreConfig,
    StoreUnavailable,
    quiet_environment,
)

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
        reply = self._ask([key, tokens, error])
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

    def rejoin(self, address: str) -> None:
        """Moves to the store of another master."""
        assert self._ask(address) == "moved"

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._reply()

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


def rewrite(client: StoreClient, handle: str, change: Callable[[bytearray], bytes]) -> None:
    """Puts other bytes under a handle."""
    payload = change(bytearray(client._client.get(handle)))
    assert client._client.remove(handle, True) == 0
    assert client._client.put(handle, payload) == 0


def flip(place: int) -> Callable[[bytearray], bytes]:
    """Changes one bit of the byte at `place`."""

    def change(payload: bytearray) -> bytes:
        payload[place] ^= 4
        return bytes(payload)

    return change


def test_states_come_back_as_they_were_written(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("sample-1", 10)
    assert manifest["metadata"]["total_aligned_bytes"] == SHAPE.sample_bytes(10)
    states = reader.read(manifest, timeout_s=5.0, expected_token_ids=range(10))
    assert states["hidden_states"].shape == (10, 3, 64) and states["hidden_states"].dtype == torch.float32
    assert set(states) == {"hidden_states", "token_ids"}
    assert torch.equal(states["hidden_states"].flatten(), torch.arange(10 * 3 * 64, dtype=torch.float32))
    with pytest.raises(StatesLost, match="other token ids"):
        reader.read(manifest, timeout_s=5.0, expected_token_ids=[1, 2, 3])
    client.delete(["sample-1"])


@pytest.mark.parametrize("place", [0, 10 * 3 * 64 * 4 - 1, 10 * 3 * 64 * 4 + 8, -64])
def test_flipped_bits_show(writer: Writer, reader: StatesReader, client: StoreClient, place: int) -> None:
    manifest = writer.put(f"flipped{place}", 10)
    reader.read(manifest, timeout_s=5.0)
    rewrite(client, manifest["handle"], flip(place))
    with pytest.raises(StatesLost, match=r"their checksum is [0-9a-f]{32}, but [0-9a-f]{32} was written"):
        reader.read(manifest, timeout_s=5.0)
    client.delete([manifest["handle"]])


def test_a_truncated_payload_shows(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("truncated", 10)
    rewrite(client, "truncated", lambda payload: bytes(payload[:-64]))
    with pytest.raises(StatesLost, match=r"payload size \d+ doesn't match"):
        reader.read(manifest, timeout_s=5.0)
    client.delete(["truncated"])


def test_the_payload_of_another_sample_shows(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("mine", 10)
    writer.put("other", 10)
    rewrite(client, "mine", lambda _: client._client.get("other"))
    with pytest.raises(StatesLost, match="checksum"):
        reader.read(manifest, timeout_s=5.0)
    client.delete(["mine", "other"])


def test_a_store_is_cleared_of_leased_states_too(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    client.clear()
    for key in ("run-1-a", "run-1-b", "krun_1-c", "run-10-a"):
        reader.read(writer.put(key, 5), timeout_s=5.0)  # the lease that this grants does not keep them
    writer.put("run-1-d", 5, error="no states")
    assert client.clear_prefixed("run.1") == 4
    assert client.missing(["run-1-a", "run-1-b", "krun_1-c", "run-1-d", "run-10-a"])[-1] == "run-1-d"
    assert client.clear() == 1 and client.clear() == 0
    assert client.missing(["run-10-a"]) == ["run-10-a"]


def test_deleted_states_are_lost(writer: Writer, reader: StatesReader, client: StoreClient) -> None:
    manifest = writer.put("sample-2", 5)
    reader.read(manifest, timeout_s=5.0)  # the lease that this grants does not keep it from being deleted
    assert client.missing(["sample-2", "never"]) == ["never"]
    client.delete(["sample-2", "never"])
    began = time.monotonic()
    with pytest.raises(StatesLost, match=r"sample-2 are lost: not found within 0\.\d s"):
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


def test_a_master_gets_the_ports_that_are_wanted_when_they_are_free(master: MasterProcess, tmp_path: Path) -> None:
    second = MasterProcess(tmp_path / "second.log", "127.0.0.1")
    with pytest.raises(RuntimeError, match="never started"):
        _ = second.address
    address = second.start(wanted=master.ports)
    assert address == second.address and second.ports[0] != master.ports[0]
    wanted = second.ports
    second.stop()
    third = MasterProcess(tmp_path / "third.log", "127.0.0.1")
    assert third.start(wanted) == address
    third.stop()


def test_all_sides_move_to_another_master(tmp_path: Path) -> None:
    first, second = (MasterProcess(tmp_path / f"{name}.log", "127.0.0.1") for name in ("first", "second"))
    config = StoreConfig(first.start(), segment_bytes=SEGMENT_BYTES, buffer_bytes=16 << 20)
    writer, reader, client = Writer(config), StatesReader(config), StoreClient(config)
    before = writer.put("before", 5)
    first.stop()
    with pytest.raises(StoreUnavailable):
        client.missing(["before"])
    with pytest.raises(StoreUnavailable):
        client.rejoin("127.0.0.1:1")
    address = second.start()
    for side in (writer, reader, client):
        side.rejoin(address)
    with pytest.raises(StatesLost, match="not found"):
        reader.read(before, timeout_s=0.3)
    states = reader.read(writer.put("after", 5), timeout_s=5.0)
    assert states["token_ids"].tolist() == list(range(5))
    reader.rejoin(address)  # it is there already
    assert client.missing(["before", "after"]) == ["before"]
    client.delete(["after"])
    assert client.missing(["after"]) == ["after"]
    writer.kill()
    reader.close()
    client.close()
    second.stop()
