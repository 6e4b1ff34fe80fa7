"""The learning rate's course over a training: a warm-up, then a decay."""

from __future__ import annotations

import math

from draftline.recipe.schema import Optimizer


def lr_factor(step: int, steps: int, optimizer: Optimizer) -> float:
    """Learning rate of `step` (0 to steps - 1) as a share of the peak.

    Rises linearly over the warm-up steps and reaches 1 at its last one; then falls to `min_lr_share` at the last step.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside 0 to {steps - 1}")
    warmup = min(steps, math.ceil(optimizer.warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    if optimizer.decay == "constant":
        return 1.0
    # The warm-up's last step had factor 1, so the decay begins there; without a warm-up it begins at step 0.
    first = max(warmup - 1, 0)
    done = (step - first) / max(steps - 1 - first, 1)
    shape = 1.0 - done if optimizer.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.min_lr_share + (1.0 - optimizer.min_lr_share) * shape
