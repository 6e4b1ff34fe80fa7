"""Makes a training on CPUs give the same bits in every process."""

from __future__ import annotations


def make_reproducible(threads: int) -> None:
    """Fixes this process's threads and the order of its sums.

    torch splits work by the number of threads, and with more than one it adds up gradients of indexed rows in whatever
    order the threads come, unless it is told not to. Reductions over ranks (gloo's ring) have a fixed order.
    """
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling uninitialised memory costs time, and nothing here reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
