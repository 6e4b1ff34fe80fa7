"""What a training says about itself: a record per step, the held-out evaluations, and the figures made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftline.storage.files import write_text_atomic
from draftline.training.trajectory import Trajectory

WARM_UP_SHARE, WARM_UP_STEPS = 0.1, 5


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimiser step of one rank; times in seconds."""

    step: int
    loss: float
    eal: float
    accept_len: float
    lr: float
    tokens: int
    anchors: int
    wait_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Time of the whole step, waiting included."""
        return self.wait_s + self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Means over the held-out rows of all ranks, after `step` steps.

    `eal` is the greedy acceptance length at random anchors, bonus token included.
    """

    step: int
    loss: float
    eal: float
    accept_len: float
    confidence_error: float


@dataclass(slots=True)
class History:
    """All records of a training so far; travels in its checkpoints.

    `steps` are of one rank; `consumed` is of all ranks, up to the last checkpoint, and kept by rank 0.
    """

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    consumed: Trajectory = field(default_factory=Trajectory)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `consumed`: for every step a list over ranks of sample numbers in row order."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "consumed": list(self.consumed),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """The inverse of `as_dict`."""
        return cls(
            [StepRecord(**step) for step in values["steps"]],
            [EvaluationRecord(**evaluation) for evaluation in values["evaluations"]],
            Trajectory(values["consumed"]),
        )

    def figures(self) -> dict[str, float]:
        """The training's figures, for the report."""
        first, last = self.evaluations[0], self.evaluations[-1]
        return {
            "steps": len(self.steps),
            "tokens": sum(step.tokens for step in self.steps),
            "anchors": sum(step.anchors for step in self.steps),
            "eal_start": first.eal,
            "eal_held_out": last.eal,
            "accept_len_held_out": last.accept_len,
            "confidence_error_held_out": last.confidence_error,
            "loss_start": first.loss,
            "loss_held_out": last.loss,
            "data_wait_share": data_wait_share(self.steps),
            "step_s": sum(step.total_s for step in self.steps) / max(len(self.steps), 1),
        }


def write_history(path: Path, history: Mapping[str, Sequence[Any]]) -> None:
    """Writes what `History.as_dict` returned as JSON, whole or not at all, one record a line."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in records) + "\n]"
        for name, records in history.items()
    ]
    write_text_atomic(path, "{" + ",\n".join(parts) + "}\n")


def data_wait_share(steps: Sequence[StepRecord]) -> float:
    """Share of the time spent waiting for data, without the warm-up: the first tenth of the steps, at least 5."""
    warm = steps[max(WARM_UP_STEPS, round(WARM_UP_SHARE * len(steps))) :]
    total = sum(step.total_s for step in warm)
    return sum(step.wait_s for step in warm) / total if total else 0.0
