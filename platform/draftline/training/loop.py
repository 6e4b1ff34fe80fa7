"""The train loop itself: rows in, weights out. It knows nothing of Ray, the feeder or the store.

One call of `train` is one rank's part; several ranks meet in the model wrapper (DDP) and in three small reductions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from draftline.recipe.schema import Training
from draftline.training.checkpoint import CheckpointFolder
from draftline.training.forward import MetricSums, forward_row, loss_arguments, row_seed
from draftline.training.model import Accelerator, DraftModel
from draftline.training.optimizer import Optimizers, build_optimizers
from draftline.training.records import EvaluationRecord, History, StepRecord
from draftline.training.rows import PackedRow, Packing, SampleStates, pack_row
from draftline.training.schedule import lr_factor

EVALUATION_SEED = 7_777_777


class RowSource(Protocol):
    """Where a rank's rows come from."""

    def row(self, step: int) -> Sequence[SampleStates]:
        """The rank's row of a step; waits for it. Steps are asked for in order, from where training (re)starts."""

    def commit(self, step: int) -> None:
        """The row of this step has been used: its hidden states are needed no more."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop must know besides the recipe's training section."""

    steps: int
    seed: int
    accelerator: Accelerator = "cpu"
    device: str = "cpu"
    rank: int = 0
    ranks: int = 1


def packing_of(model: DraftModel, recipe: Training, accelerator: Accelerator) -> Packing:
    """How this model's rows are laid out: as short as they can be on a CPU, all alike for a GPU's compiled kernels."""
    return Packing(
        block_size=model.block_size,
        anchor_first=model.anchor_first,
        taps=len(model.target_layer_ids),
        hidden_size=model.hidden_size,
        fixed_tokens=recipe.row_tokens if accelerator == "gpu" else None,
        multiple=128 if accelerator == "gpu" else 64,
    )


class Trainer:
    """One rank's training: `run` goes from the newest checkpoint, or from the start, to the last step."""

    def __init__(
        self,
        model: DraftModel,
        recipe: Training,
        settings: LoopSettings,
        checkpoints: CheckpointFolder,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._recipe, self._settings, self._checkpoints, self._report = recipe, settings, checkpoints, report
        self._device = torch.device(settings.device)
        self._draft = model
        nn.Module.to(model, self._device)
        self._packing = packing_of(model, recipe, settings.accelerator)
        self._arguments = loss_arguments(recipe.loss, settings.accelerator)
        self._optimizers: Optimizers = build_optimizers(model, recipe.optimizer)
        self._trainable = [weight for weight in model.parameters() if weight.requires_grad]
        self._history = History()
        self.start_step = 0
        restored = checkpoints.restore(model, self._optimizers)
        if restored is not None:
            self.start_step, self._history = restored.step, History.from_dict(restored.history)
        # Every rank has read the same checkpoint or drawn the same weights; DDP checks and broadcasts them anyway.
        self._model: nn.Module = model
        if settings.ranks > 1:
            self._model = DistributedDataParallel(model, broadcast_buffers=False)

    def run(self, rows: RowSource, held_out_rows: Sequence[Sequence[SampleStates]]) -> History:
        """Trains to the last step; returns the records, which every rank has for itself.

        `held_out_rows` are this rank's; every evaluation goes over them with the same anchors.
        """
        held_out = [pack_row(samples, self._packing) for samples in held_out_rows]
        if not self._history.evaluations:
            self._evaluate(0, held_out)
            self._tell(0)
        for step in range(self.start_step, self._settings.steps):
            self._history.steps.append(self._step(step, rows))
            done = step + 1
            last = done == self._settings.steps
            if last or done % self._recipe.evaluate_every_steps == 0:
                self._evaluate(done, held_out)
            if last or done % self._recipe.checkpoint_every_steps == 0:
                self._save(done)
            self._tell(done)
        return self._history

    def _tell(self, done: int) -> None:
        """Reports the steps done, the last one's figures and the newest held-out evaluation."""
        update: dict[str, Any] = {"step": done, "steps": self._settings.steps}
        if self._history.steps:
            last = self._history.steps[-1]
            update |= {"loss": last.loss, "eal": last.eal, "accept_len": last.accept_len, "lr": last.lr}
            update |= {"tokens": last.tokens, "wait_s": last.wait_s, "step_s": last.total_s}
        if self._history.evaluations:
            update["eal_held_out"] = self._history.evaluations[-1].eal
        self._report(update)

    def _step(self, step: int, rows: RowSource) -> StepRecord:
        began = time.perf_counter()
        samples = rows.row(step)
        waited = time.perf_counter()
        row = pack_row(samples, self._packing)
        self._model.train()
        seed = row_seed(self._settings.seed, step, self._settings.rank)
        loss, metrics = self._forward(row, seed)
        forwarded = time.perf_counter()
        (loss * self._rank_weight(metrics)).backward()
        backwarded = time.perf_counter()
        nn.utils.clip_grad_norm_(self._trainable, self._recipe.optimizer.clip_norm)
        lr = self._optimizers.step(lr_factor(step, self._settings.steps, self._recipe.optimizer))
        loss_value = loss.item()  # waits for the GPU, so the row is used up before it is committed
        rows.commit(step)
        return StepRecord(
            step=step,
            loss=loss_value,
            eal=_mean(metrics, "eal"),
            accept_len=_mean(metrics, "accept_len"),
            lr=lr,
            tokens=row.tokens,
            anchors=min(row.anchors, self._recipe.max_anchors),
            wait_s=waited - began,
            forward_s=forwarded - waited,
            backward_s=backwarded - forwarded,
            optimizer_s=time.perf_counter() - backwarded,
        )

    def _forward(self, row: PackedRow, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        gpu = self._settings.accelerator == "gpu"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=gpu):
            return forward_row(
                self._model,
                row,
                self._arguments,
                max_anchors=self._recipe.max_anchors,
                fixed_anchors=gpu,
                seed=seed,
                device=self._device,
            )

    def _rank_weight(self, metrics: dict[str, Tensor]) -> Tensor | float:
        """Makes DDP's mean over ranks the mean over supervised slots, so that a padding row does not dilute a step."""
        if self._settings.ranks == 1:
            return 1.0
        own = metrics["full_acc_total"].detach().clone()
        total = own.clone()
        torch.distributed.all_reduce(total)
        return own * self._settings.ranks / total.clamp_min(1.0)

    def _evaluate(self, step: int, held_out: Sequence[PackedRow]) -> None:
        self._model.eval()
        sums = MetricSums()
        with torch.no_grad():
            for number, row in enumerate(held_out):
                if row.anchors:
                    sums.add(self._forward(row, row_seed(EVALUATION_SEED, number, self._settings.rank))[1])
        names = ("loss", "eal", "accept_len", "confidence_abs_error")
        means = sums.means(names, over_ranks=self._settings.ranks > 1, device=self._device)
        record = EvaluationRecord(step, means["loss"], means["eal"], means["accept_len"], means["confidence_abs_error"])
        self._history.evaluations.append(record)

    def _save(self, done: int) -> None:
        if self._settings.rank == 0:
            self._checkpoints.save(done, self._draft, self._optimizers, self._history.as_dict())
        if self._settings.ranks > 1:
            torch.distributed.barrier()


def _mean(metrics: dict[str, Tensor], name: str) -> float:
    total = float(metrics[f"{name}_total"])
    return float(metrics[f"{name}_sum"]) / total if total else 0.0
