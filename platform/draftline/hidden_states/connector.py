"""The vLLM side of hidden states: hs-connectors' Mooncake connector, on request, with or without an accelerator.

The engine that captures also answers prompts; only requests that ask for it are written to the store, since unread
states would fill it. Loaded by vLLM inside its engine processes, by name (see `targets.engine_args`).
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector
from vllm.v1.request import Request, RequestStatus

from draftline.hidden_states.checksum import add_checksum
from draftline.hidden_states.writer import PatientStore

# A request that ended in another way (aborted, refused, failed) may never have been computed, or only in part; upstream
# would look for its blocks and stop the engine.
COMPUTED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)
# In a request's `kv_transfer_params`: write this request's hidden states.
CAPTURE = "draftline_capture"


class _NoStream:
    """A stream or event of a machine whose memory is the host's: everything has already happened."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...


_HOST = SimpleNamespace(Stream=_NoStream, Event=_NoStream, stream=lambda stream: contextlib.nullcontext())


class HiddenStatesConnector(MooncakeHiddenStatesConnector):
    """Writes the hidden states of requests that carry `CAPTURE`, and of no others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: PatientStore = PatientStore(self._store.config)

    def _device(self) -> Any:
        if torch.accelerator.current_accelerator() is None:
            return _HOST
        return super()._device()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        wanted = bool((request.kv_transfer_params or {}).get(CAPTURE))
        if not wanted or request.status not in COMPUTED:
            self._request_keys.pop(request.request_id, None)
            return False, None
        held_back, manifest = super().request_finished(request, block_ids)
        # The same manifest waits with the request's pending save: the writer sees the room that is added here.
        return held_back, manifest and add_checksum(manifest)

    def rejoin_store(self, master_address: str) -> None:
        """Moves this process's segment to another master; see `PatientStore.rejoin`."""
        self._store.rejoin(master_address)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # vLLM asserts that whoever is reported as sent was held back for sending. The pending saves of a request come
        # in the same step as its end, to every tensor-parallel rank.
        held_back: set[str] = set()
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            held_back = {pending.req_id for pending in getattr(metadata, "pending_saves", [])}
        return super().get_finished(finished_req_ids & held_back)
