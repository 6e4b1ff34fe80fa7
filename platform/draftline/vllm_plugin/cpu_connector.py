"""hs-connectors' Mooncake connector for machines without an accelerator, with requests that end early kept out."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from hs_connectors.mooncake_hidden_states_connector import MooncakeConnectorMetadata, MooncakeHiddenStatesConnector
from vllm.v1.request import Request, RequestStatus

# A request that ended in another way (aborted, refused, failed) may never have been computed, or only in part.
COMPUTED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)


class _Event:
    """Work on the CPU is done when the call returns: there is nothing to wait for."""

    def record(self) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""


class _Stream:
    def wait_event(self, event: _Event) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""


_CPU = SimpleNamespace(Event=_Event, Stream=_Stream, stream=lambda stream: contextlib.nullcontext())


class CpuMooncakeHiddenStatesConnector(MooncakeHiddenStatesConnector):
    """Stores a request's hidden states when it was computed to its end, and nothing otherwise.

    Upstream stores them for every request that ends. One aborted while it waits has no cache blocks, one aborted
    midway has too few: its readers would get an error marker or states that were never written. Here such a request is
    let go at once, so it must not be reported as sent later either: vLLM would look for it and stop the engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._announced: set[str] = set()

    def _device(self) -> Any:
        return _CPU

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Scheduler side. Returns (blocks are still needed, manifest); (False, None) for a request cut short."""
        if request.status in COMPUTED:
            return super().request_finished(request, block_ids)
        self._request_keys.pop(request.request_id, None)
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Worker side. Reports only requests whose states were announced for saving, once they are stored."""
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, MooncakeConnectorMetadata):
                self._announced.update(pending.req_id for pending in metadata.pending_saves)
        sent, received = super().get_finished(finished_req_ids & self._announced)
        self._announced -= sent or set()
        return sent, received
