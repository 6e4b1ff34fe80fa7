"""The writing side of the store, inside a target replica: hs-connectors' store, which does not give up at once."""

from __future__ import annotations

import time
from typing import Any

import torch
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeIntegrityError, MooncakeStoreConfig

from draftline.hidden_states.store import local_address

# While a replica's death is not noticed, the master still hands out room in its segment, and such puts fail. Longer
# than the master takes to notice (master.CLIENT_TTL_S), shorter than the feeder waits (feeder.ARRIVAL_S).
PATIENCE_S = 12.0
RETRY_S = 0.2


class PatientStore(MooncakeHiddenStatesStore):
    """Tries a put again for up to `patience_s` seconds, and joins the store under this machine's own address."""

    def __init__(self, config: MooncakeStoreConfig, patience_s: float = PATIENCE_S) -> None:
        super().__init__(config)
        self._patience_s = patience_s

    def setup(self) -> PatientStore:
        """Joins the store. The configuration was made where the driver runs; its host name may be another machine's."""
        self.config.local_hostname = local_address(self.config.master_server_address)
        super().setup()
        return self

    def put_sample(self, transfer_manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Writes one sample. Raises RuntimeError when the store refuses it for too long."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return super().put_sample(transfer_manifest, tensors)
            except MooncakeIntegrityError:
                raise
            except RuntimeError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_S)

    def close(self) -> None:
        """Leaves the store: what lies in this process's segment is gone, and nothing is put there any more."""
        if self.is_setup:
            self._require_store().close()
