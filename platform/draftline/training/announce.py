"""Tells Ray Train of checkpoints: it knows where they are, and neither copies nor keeps them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.storage.files import write_json_atomic

POINTER = "checkpoint.json"
# Ray Train's controller takes one report every two seconds; more would hold up the training.
ANNOUNCE_EVERY_S = 30.0


class Announcer:
    """`checkpoint` is called on every rank after each checkpoint, and `end` on every rank when training is over.

    Ray Train only takes checkpoints within its own folder. What it gets is a pointer: a small file that names the
    published checkpoint, `where`.
    """

    def __init__(self, where: Mapping[str, Any], rank: int, ranks: int) -> None:
        self._where, self._rank, self._ranks = where, rank, ranks
        self._last = float("-inf")
        self._newest: int | None = None
        self._told: int | None = None

    def checkpoint(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports the checkpoint of `step`, unless one was reported a moment ago."""
        self._newest = step
        if self._due():
            self._last = time.monotonic()
            self._report(metrics)

    def end(self, metrics: Mapping[str, float]) -> None:
        """Reports the end's figures, with the newest checkpoint."""
        self._report(metrics)

    def _due(self) -> bool:
        """Rank 0's clock decides for all: every rank must report equally often."""
        due = [time.monotonic() - self._last >= ANNOUNCE_EVERY_S]
        if self._ranks > 1:
            import torch

            torch.distributed.broadcast_object_list(due, src=0)
        return due[0]

    def _report(self, metrics: Mapping[str, float]) -> None:
        import ray.train

        if self._rank != 0 or self._newest is None or self._newest == self._told:
            ray.train.report(dict(metrics))
            return
        self._told = self._newest
        with tempfile.TemporaryDirectory() as folder:
            write_json_atomic(Path(folder) / POINTER, {"step": self._newest, **self._where})
            ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))
