"""The writing side of the store, inside a target replica: hs-connectors' store, which does not give up at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeIntegrityError, MooncakeStoreConfig

from draftline.hidden_states.checksum import CHECKSUM, checksum
from draftline.hidden_states.store import local_address, require_master

# While a replica's death is not noticed, the master still hands out room in its segment, and such puts fail. Longer
# than the master takes to notice (master.CLIENT_TTL_S), shorter than the feeder waits (arrivals.ARRIVAL_S).
PATIENCE_S = 12.0
RETRY_S = 0.2


class PatientStore(MooncakeHiddenStatesStore):
    """Adds a checksum to what it writes, tries a put again for up to `patience_s` seconds, and can change its master.

    It joins the store under this machine's own address. Several threads may put at once.
    """

    def __init__(self, config: MooncakeStoreConfig, patience_s: float = PATIENCE_S) -> None:
        super().__init__(config)
        self._patience_s = patience_s
        self._free = threading.Condition()
        self._puts = 0
        self._joined = False

    def setup(self) -> PatientStore:
        """Joins the store. The configuration was made where the driver runs; its host name may be another machine's."""
        self._joined = True
        self.config.local_hostname = local_address(self.config.master_server_address)
        super().setup()
        return self

    def put_sample(self, transfer_manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Writes one sample, in the room that `add_checksum` made in its manifest.

        Raises RuntimeError when the store refuses it for too long.
        """
        deadline = time.monotonic() + self._patience_s
        # Taken from the host's copy: what reaches the store is what was hashed.
        host = {name: tensor.cpu() for name, tensor in tensors.items()}
        host[CHECKSUM] = checksum(transfer_manifest, host)
        while True:
            try:
                with self._putting():
                    return super().put_sample(transfer_manifest, host)
            except MooncakeIntegrityError:
                raise
            except RuntimeError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_S)

    def put_error(self, transfer_manifest: dict[str, Any], error: str) -> None:
        """Writes the marker that tells readers why there are no states."""
        with self._putting():
            super().put_error(transfer_manifest, error)

    def rejoin(self, master_address: str) -> None:
        """Leaves the store and joins the one of another master, once puts under way have ended.

        Does nothing when that is the master already; a store that was not joined yet will be joined there. Raises
        RuntimeError when the new master is not there or does not let it in; the next call tries again.
        """
        with self._free:
            self._free.wait_for(lambda: not self._puts)
            if self.config.master_server_address == master_address and self.is_setup == self._joined:
                return
            if self._joined:
                require_master(master_address)
            self.config.master_server_address = master_address
            if self.is_setup:
                self._require_store().close()
                self._store, self._staging = None, {}  # the buffers were registered with the client that is closed
            if self._joined:
                self.setup()

    def close(self) -> None:
        """Leaves the store: what lies in this process's segment is gone, and nothing is put there any more."""
        if self.is_setup:
            self._require_store().close()

    @contextmanager
    def _putting(self) -> Iterator[None]:
        """The client stays the same meanwhile."""
        with self._free:
            self._puts += 1
        try:
            yield
        finally:
            with self._free:
                self._puts -= 1
                self._free.notify_all()
