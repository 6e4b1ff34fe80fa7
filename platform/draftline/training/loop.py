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
from draftline.training.checkpoint import CheckpointFolder, Restored
from draftline.training.forward import MetricSums, forward_row, loss_arguments, row_seed
from draftline.training.model import Accelerator, DraftModel
from draftline.training.optimizer import Optimizers, build_optimizers
from draftline.training.records import EvaluationRecord, History, StepRecord
from draftline.training.rows import PackedRow, Packing, SampleStates, pack_row
from draftline.training.schedule import lr_factor

EVALUATION_SEED = 7_777_777


class RowSource(Protocol):
    """Where a rank's rows come from."""

    def row(self, step: int) -> Sequence[SampleStates] | None:
        """The rank's row of a step; waits for it. Steps are asked for in order, from where training (re)starts.

        None: training ends before this step, for every rank alike.
        """

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
    """One rank's training: `run` goes from the newest checkpoint, or from the start, to the last step.

    Several ranks need torch's process group before this is made. `saved(step, history)` is called on every rank after
    each checkpoint, `report(figures)` after each step.
    """

    def __init__(
        self,
        model: DraftModel,
        recipe: Training,
        settings: LoopSettings,
        checkpoints: CheckpointFolder,
        report: Callable[[dict[str, Any]], None] = lambda _: None,
        saved: Callable[[int, History], None] = lambda *_: None,
    ) -> None:
        self._recipe, self._settings, self._checkpoints = recipe, settings, checkpoints
        self._report, self._saved = report, saved
        self._device = torch.device(settings.device)
        self._draft = model
        nn.Module.to(model, self._device)
        self._packing = packing_of(model, recipe, settings.accelerator)
        self._arguments = loss_arguments(recipe.loss, settings.accelerator)
        self._optimizers: Optimizers = build_optimizers(model, recipe.optimizer)
        self._trainable = [weight for weight in model.parameters() if weight.requires_grad]
        self._history = History()
        self._used: list[list[int]] = []  # this rank's sample numbers by step, since the last checkpoint
        self._saved_step: int | None = None
        self.start_step = 0
        self.stopped_at: int | None = None  # steps done when training was asked to end early
        restored = self._restore(model)
        if restored is not None:
            self.start_step, self._history = restored.step, History.from_dict(restored.history)
            self._saved_step = restored.step
        # Every rank has read the same checkpoint or drawn the same weights; DDP checks and broadcasts them anyway.
        self._model: nn.Module = model
        if settings.ranks > 1:
            # DDP would reorder its buckets after the first step, and with them the order of sums over three or more
            # ranks: a resumed training would differ in the last bits. Looking for unused parameters keeps the order.
            self._model = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)

    def _restore(self, model: DraftModel) -> Restored | None:
        """Rank 0 chooses the checkpoint: the others may see older ones on their machines."""
        rank, ranks = self._settings.rank, self._settings.ranks
        restored = self._checkpoints.restore(model, self._optimizers) if rank == 0 else None
        if ranks > 1:
            chosen = [None if restored is None else restored.step]
            torch.distributed.broadcast_object_list(chosen, src=0)
            if rank > 0 and chosen[0] is not None:
                restored = self._checkpoints.restore(model, self._optimizers, chosen[0])
        return restored

    def run(self, rows: RowSource, held_out_rows: Sequence[Sequence[SampleStates]]) -> History:
        """Trains to the last step, or to where the rows end; returns the records, which every rank has for itself.

        `held_out_rows` are this rank's; every evaluation goes over them with the same anchors. A training that ends
        early leaves a checkpoint and no further evaluation, so that it resumes as if it had never ended.
        """
        held_out = [pack_row(samples, self._packing) for samples in held_out_rows]
        if not self._history.evaluations:
            self._evaluate(0, held_out)
            self._tell(0)
        for step in range(self.start_step, self._settings.steps):
            record = self._step(step, rows)
            if record is None:
                self.stopped_at = step
                if self._saved_step != step:
                    self._save(step)
                break
            self._history.steps.append(record)
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

    def _step(self, step: int, rows: RowSource) -> StepRecord | None:
        """One step; None when there is no row for it."""
        began = time.perf_counter()
        samples = rows.row(step)
        if samples is None:
            return None
        self._used.append([sample.number for sample in samples])
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
        gathered = self._gather()
        if self._settings.rank == 0:
            for by_rank in zip(*gathered, strict=True):
                self._history.consumed.append(by_rank)
            self._checkpoints.save(done, self._draft, self._optimizers, self._history.as_dict())
        if self._settings.ranks > 1:
            torch.distributed.barrier()
        self._saved_step = done
        self._saved(done, self._history)

    def _gather(self) -> list[list[list[int]]]:
        """For every rank the sample numbers of its steps since the last checkpoint; nothing on other ranks than 0."""
        used, self._used = self._used, []
        if self._settings.ranks == 1:
            return [used]
        gathered: list[Any] | None = [None] * self._settings.ranks if self._settings.rank == 0 else None
        torch.distributed.gather_object(used, gathered, dst=0)
        return gathered or []


def _mean(metrics: dict[str, Tensor], name: str) -> float:
    total = float(metrics[f"{name}_total"])
    return float(metrics[f"{name}_sum"]) / total if total else 0.0
