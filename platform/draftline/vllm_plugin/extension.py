"""Methods that draftline adds to vLLM's worker, callable through `collective_rpc` (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any

import torch


class WorkerExtension:
    """Mixed into the worker class by vLLM; works with any of its workers."""

    def set_threads(self, threads: int) -> int:
        """Run the worker's tensor work on `threads` CPU threads from now on; returns how many it was before.

        Must run on the thread that runs the model, which `collective_rpc` does: OpenMP keeps the number per thread.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, found {threads}")
        before = torch.get_num_threads()
        # vLLM's CPU worker replaces torch.set_num_threads by a function that only warns.
        torch._C.set_num_threads(threads)
        return before

    def rejoin_store(self, master_address: str) -> None:
        """Move what this engine writes hidden states to, and offers memory to, to another Mooncake master's store."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()  # hidden_states.connector.HiddenStatesConnector
        connector.rejoin_store(master_address)
