"""AdamW, or Muon for matrices with AdamW for the rest, behind one small handle."""

from __future__ import annotations

from typing import Any

import torch
from speculators.train.optimizers import split_named_params_for_muon
from torch import nn

from draftline.recipe.schema import Optimizer


class Optimizers:
    """One or two torch optimisers that step together at the same share of their peak learning rate."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer], peak_lr: float) -> None:
        self._parts = parts
        self._peak_lr = peak_lr

    def step(self, lr_factor: float) -> float:
        """Updates the weights at `lr_factor` of the peak; returns the learning rate used."""
        lr = self._peak_lr * lr_factor
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)
        return lr

    def state_dict(self) -> dict[str, Any]:
        """State of each part by its name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; ValueError when it is of other optimisers."""
        if set(state) != set(self._parts):
            raise ValueError(f"the state is of {sorted(state)}, not of {sorted(self._parts)}")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def build_optimizers(model: nn.Module, recipe: Optimizer) -> Optimizers:
    """The recipe's optimiser over the model's trainable weights. The fused AdamW runs on CPUs and GPUs alike."""
    adamw: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "weight_decay": recipe.weight_decay, "fused": True}
    if recipe.name == "adamw":
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Optimizers({"adamw": torch.optim.AdamW(trainable, **adamw)}, recipe.lr)
    matrices, rest = split_named_params_for_muon(model)
    muon = torch.optim.Muon(
        [parameter for _, parameter in matrices],
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        # Updates of AdamW's size, so that one learning rate serves both.
        adjust_lr_fn="match_rms_adamw",
    )
    others = torch.optim.AdamW([parameter for _, parameter in rest], **adamw)
    return Optimizers({"muon": muon, "adamw": others}, recipe.lr)
