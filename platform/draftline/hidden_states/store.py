"""The store of hidden states, as its users see it. The only module that knows Mooncake's return codes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_FOUND = 1
_OK = 0
_NOT_FOUND = -704
_ERROR_SUFFIX = ":error"
# Readers bring their own registered buffers; a client's own one carries error markers only.
_READER_BUFFER_BYTES = 16 << 20
_POLL_S = (0.001, 0.05)
# A master that does not answer for so long was replaced, or its end is somebody else's to find: nobody reads on there.
_AWAY_S = 20.0
# Mooncake itself tries for 90 s to join a master that is not there.
_CONNECT_S = 5.0


class StatesLost(RuntimeError):
    """The hidden states of `key` are not to be had: they must be captured again. `reason` says what was found."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"the hidden states {self.key} are lost: {self.reason}"


class StoreUnavailable(RuntimeError):
    """The store does not answer, or not as it should."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How a process joins the store. Sizes in bytes; `segment_bytes` is what one replica offers to it."""

    master_address: str
    segment_bytes: int = 1 << 30
    buffer_bytes: int = 64 << 20
    protocol: str = "tcp"
    devices: str = ""

    def connector_config(self) -> dict[str, Any]:
        """Settings of a replica's connector, which offers a segment (hs-connectors' MooncakeStoreConfig)."""
        return self._config(self.segment_bytes, self.buffer_bytes)

    def reader_config(self) -> dict[str, Any]:
        """Settings of a process that reads or deletes: it offers no memory, so that its end loses nothing."""
        return self._config(0, min(self.buffer_bytes, _READER_BUFFER_BYTES))

    def _config(self, segment_bytes: int, buffer_bytes: int) -> dict[str, Any]:
        return {
            "local_hostname": local_address(self.master_address),
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.master_address,
            "global_segment_size": segment_bytes,
            "local_buffer_size": buffer_bytes,
            "protocol": self.protocol,
            "device_name": self.devices,
        }


def local_address(master_address: str) -> str:
    """This machine's address as the master's machine sees it. Mooncake chooses its clients' ports itself."""
    host, _, port = master_address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0])


def require_master(master_address: str) -> None:
    """Raises StoreUnavailable when nobody listens at a master's address."""
    host, _, port = master_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise StoreUnavailable(f"no Mooncake master answers at {master_address}: {error}") from error


def quiet_environment() -> dict[str, str]:
    """Environment of a process that loads Mooncake, to be set before it starts: its log shows errors only.

    Mooncake reads this variable and overrides glog's own. What the user has set stays.
    """
    return {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR")}


class StoreClient:
    """Deletes and looks up stored objects; needs neither torch nor a segment. Calls block; one thread at a time."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._client = _join(config)

    def rejoin(self, master_address: str) -> None:
        """Leaves the store for the one of another master; nothing happens when it is the same.

        Raises StoreUnavailable when that one does not let it in, and stays where it was.
        """
        if master_address == self._config.master_address:
            return
        config = replace(self._config, master_address=master_address)
        client = _join(config)
        self._client.close()
        self._config, self._client = config, client

    def delete(self, handles: Sequence[str]) -> None:
        """Removes states and error markers, leased or not; absent ones are fine. Raises StoreUnavailable."""
        keys = [handle + suffix for handle in handles for suffix in ("", _ERROR_SUFFIX)]
        for key, status in zip(keys, self._client.batch_remove(keys, True) if keys else [], strict=True):
            if status not in (_OK, _NOT_FOUND):
                raise StoreUnavailable(f"cannot delete {key} (status {status})")

    def clear(self) -> int:
        """Removes all that the store holds, leased or not; returns how many objects. Raises StoreUnavailable."""
        return self._removed(self._client.remove_all(True))

    def clear_prefixed(self, key_prefix: str) -> int:
        """Removes all states of keys that begin with `key_prefix` and a dash, whatever their handles made of them.

        Connectors replace characters that a handle may not have, and put a letter before a leading digit. Returns how
        many objects were removed. Raises StoreUnavailable.
        """
        pattern = re.sub(r"[^a-zA-Z0-9_-]", ".", key_prefix)
        return self._removed(self._client.remove_by_regex(f"^k?{pattern}-.*", True))

    def _removed(self, count: int) -> int:
        if count < 0:
            raise StoreUnavailable(f"cannot clear the store (status {count})")
        return int(count)

    def missing(self, handles: Sequence[str]) -> list[str]:
        """Those of the handles that hold neither states nor an error marker. Raises StoreUnavailable."""
        markers = [handle + _ERROR_SUFFIX for handle in self._absent(handles)]
        return [marker.removesuffix(_ERROR_SUFFIX) for marker in self._absent(markers)]

    def _absent(self, keys: Sequence[str]) -> list[str]:
        found = self._client.batch_is_exist(list(keys)) if keys else []
        if any(status < 0 for status in found):
            raise StoreUnavailable(f"cannot look up {len(keys)} keys (status {min(found)})")
        return [key for key, status in zip(keys, found, strict=True) if status != _FOUND]

    def close(self) -> None:
        """Leaves the store."""
        self._client.close()


class StatesReader:
    """Reads hidden states into this process's memory. Use one thread: each keeps its own registered buffer."""

    def __init__(self, config: StoreConfig) -> None:
        self._join(config)

    def _join(self, config: StoreConfig) -> None:
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

        require_master(config.master_address)
        store = MooncakeHiddenStatesStore(MooncakeStoreConfig.from_dict(config.reader_config()))
        try:
            store.setup()
        except RuntimeError as error:
            raise StoreUnavailable(f"cannot join the store at {config.master_address}: {error}") from error
        self._config, self._store, self._client = config, store, store._require_store()

    def rejoin(self, master_address: str) -> None:
        """Leaves the store for the one of another master; nothing happens when it is the same.

        To be called before every read with the delivery's `store`. Raises StoreUnavailable when that master does not
        let it in, and stays where it was.
        """
        if master_address == self._config.master_address:
            return
        left = self._client
        self._join(replace(self._config, master_address=master_address))
        with contextlib.suppress(RuntimeError):
            left.close()

    def read(
        self, manifest: Mapping[str, Any], timeout_s: float, expected_token_ids: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """The states that a manifest describes: `hidden_states` [T, layers, H] and `token_ids` [T], on the CPU.

        A manifest can come before its states: waits up to `timeout_s` seconds for them, and longer for a store that
        does not answer. Raises StatesLost when they do not come, cannot be fetched, were replaced by the producer's
        error, do not match their checksum, or are those of other token ids.
        """
        from draftline.hidden_states.checksum import CHECKSUM, checksum

        handle = str(manifest["handle"])
        self._wait(handle, timeout_s)
        try:
            states = self._store.get_sample(dict(manifest), timeout=0.0)
        except (TimeoutError, RuntimeError) as error:
            raise StatesLost(handle, str(error).split("\nTransfer manifest")[0]) from error
        written = states.pop(CHECKSUM, None)
        if written is None:
            raise StatesLost(handle, "their manifest has no checksum")
        if not written.equal(found := checksum(manifest, states)):
            raise StatesLost(handle, f"their checksum is {_hex(found)}, but {_hex(written)} was written")
        if expected_token_ids is not None and states["token_ids"].tolist() != list(expected_token_ids):
            raise StatesLost(handle, "they belong to other token ids")
        return states

    def _wait(self, handle: str, timeout_s: float) -> None:
        """Waits until states or error marker are there. A store that is away for a moment is waited for as well."""
        began = answered = time.monotonic()
        pause, longest = _POLL_S
        while True:
            found = self._client.batch_is_exist([handle, handle + _ERROR_SUFFIX])
            if _FOUND in found:
                return
            now = time.monotonic()
            if min(found) >= 0:
                answered = now
                if now - began >= timeout_s:
                    raise StatesLost(handle, f"not found within {now - began:.1f} s")
            elif now - answered >= _AWAY_S:
                problem = f"the store does not answer (status {min(found)})"
                raise StatesLost(handle, f"{problem} within {now - began:.1f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def delete(self, key: str) -> None:
        """Removes states by their handle, read or not; absent ones are fine."""
        try:
            self._store.delete_sample(key)
        except RuntimeError as error:
            raise StoreUnavailable(f"cannot delete {key}: {error}") from error

    def close(self) -> None:
        """Leaves the store."""
        with contextlib.suppress(RuntimeError):
            self._client.close()


def _join(config: StoreConfig) -> Any:
    """A Mooncake client that has joined the store without offering memory. Raises StoreUnavailable."""
    from mooncake.store import MooncakeDistributedStore

    require_master(config.master_address)
    settings = config.reader_config()
    client = MooncakeDistributedStore()
    status = client.setup(
        settings["local_hostname"],
        settings["metadata_server"],
        settings["global_segment_size"],
        settings["local_buffer_size"],
        settings["protocol"],
        settings["device_name"],
        settings["master_server_address"],
    )
    if status != _OK:
        raise StoreUnavailable(f"cannot join the store at {config.master_address} (status {status})")
    return client


def _hex(checksum: torch.Tensor) -> str:
    return bytes(checksum.tolist()).hex()
