"""One forward pass of the draft over a row: the DSpark paper's loss, and its metrics as plain sums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from torch import Tensor, nn

from draftline.recipe.schema import Loss
from draftline.training.model import Accelerator
from draftline.training.rows import PackedRow


def loss_arguments(loss: Loss, accelerator: Accelerator) -> dict[str, Any]:
    """The recipe's loss as arguments of the model's forward. The fused implementation needs Triton, so a GPU."""
    implementation = "fused" if accelerator == "gpu" else "eager"
    weights = {name: weight for name, weight in (("ce", loss.ce), ("tv", loss.tv)) if weight > 0.0}
    return {
        "loss_config": resolve_loss_config(json.dumps(weights), implementation),
        "tv_loss_fn": resolve_loss_config("tv", implementation)["tv"][0],
        "gamma": loss.decay_gamma,
        "confidence_head_alpha": loss.confidence,
    }


def row_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the anchors drawn for one row: the same for the same row, however often the run was resumed."""
    return ((seed * 1_000_003 + step) * 4_099 + rank) % 2**63


def forward_row(
    model: nn.Module,
    row: PackedRow,
    arguments: Mapping[str, Any],
    *,
    max_anchors: int,
    fixed_anchors: bool,
    seed: int,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a row and its metrics (`*_sum` and `*_total` pairs, see speculators).

    Anchors are drawn at random from the row's valid positions, all of them when `max_anchors` allows. Compiled models
    want the same number every time (`fixed_anchors`); otherwise none is computed in vain.
    """
    anchors = max_anchors if fixed_anchors else max(1, min(max_anchors, row.anchors))
    torch.manual_seed(seed)
    _, loss, metrics = model(**row.inputs(device), **arguments, max_anchors=anchors)
    return loss, metrics


class MetricSums:
    """Sums of metric pairs over rows and ranks; a mean is formed only at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Adds the metrics of one row."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def means(self, names: tuple[str, ...], *, over_ranks: bool, device: torch.device) -> dict[str, float]:
        """`name_sum / name_total` of each name; 0 where nothing was counted. Every rank must call it alike."""
        pairs = torch.tensor(
            [[self._sums.get(f"{name}_sum", 0.0), self._sums.get(f"{name}_total", 0.0)] for name in names],
            dtype=torch.float64,
            device=device,
        )
        if over_ranks:
            torch.distributed.all_reduce(pairs)
        return {name: total and part / total for name, (part, total) in zip(names, pairs.tolist(), strict=True)}
