"""What must hold for a run's outputs, whatever happened on the way. Reads the run's folder only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.plan import Damage, Scenario, Victim, Way
from draftline.recipe.schema import Recipe
from draftline.samples.plan import BatchPlan, plan_rows
from draftline.samples.rows import read_samples
from draftline.storage.files import sha256_file

Consumed = Sequence[Sequence[Sequence[int]]]
"""For every step, for every rank: sample numbers in the order of the row."""

CHECKED_SAMPLES = 4  # by each replica, before training
TOKEN_BYTES = 3 * 64 * 4  # two taps and the last layer of the tiny target, float32

_FULL = re.compile("disk is full|quota is full|No space left")  # what a message says of a full disk
# What the record may call the loss of each victim. The engine's loss is noticed by whoever asks it next.
_CAUSES = {
    Victim.REPLICA: {"replica", "engine"},
    Victim.REPLICA_ENGINE: {"replica", "engine"},
    Victim.MASTER: {"master"},
    Victim.MASTER_PROCESS: {"master", "state"},
    Victim.FEEDER: {"feeder"},
    Victim.WORKER: {"workers"},
    Victim.TRAINING_DRIVER: {"workers"},
    Victim.TRAIN_CONTROLLER: {"workers"},
    Victim.BOARD: {"workers", "engine"},
    Victim.EXPORT_TASK: {"engine"},
    Victim.EVALUATION_ENGINE: {"engine"},
    Victim.EVALUATION_CORE: {"engine"},
    Victim.SERVE_REPLICA: {"serving", "engine"},
    Victim.DRIVER: {"driver"},
    Victim.COMMAND: {"driver"},
}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """How the committed training used the samples, against its plan."""

    lost: int
    repeated: int
    problems: tuple[str, ...]


def weights(run: Path) -> dict[str, str]:
    """sha256 of the trained weights: the last checkpoint's and, once it is exported, the draft's."""
    last = max((run / "checkpoints").glob("step-*"), key=lambda folder: folder.name)
    files = {"checkpoint": last / "weights.safetensors", "draft": run / "draft" / "model.safetensors"}
    return {f"{name} of {last.name}": sha256_file(file) for name, file in files.items() if file.exists()}


def planned(run: Path, recipe: Recipe) -> BatchPlan:
    """The batch plan, made again from the samples file."""
    samples = read_samples(run / "samples" / "samples.parquet")
    return plan_rows(
        {sample.number: len(sample.token_ids) for sample in samples},
        [sample.number for sample in samples if sample.held_out],
        row_tokens=recipe.training.row_tokens,
        ranks=recipe.training.workers,
        epochs=recipe.training.epochs,
        seed=recipe.seed,
    )


def compare(consumed: Consumed, plan: BatchPlan) -> Trajectory:
    """Counts what each epoch of the plan lost and repeated, and says where steps differ from it. Pure."""
    problems = []
    if len(consumed) != plan.steps:
        problems.append(f"{len(consumed)} steps are recorded, {plan.steps} planned")
    lost = repeated = 0
    used: dict[int, Counter[int]] = {}
    wanted: dict[int, Counter[int]] = {}
    for step in range(plan.steps):
        rows = [plan.row(plan.held_out_positions + step, rank) for rank in range(plan.ranks)]
        found = [tuple(samples) for samples in consumed[step]] if step < len(consumed) else []
        if found and found != [row.samples for row in rows]:
            problems.append(f"step {step} used {found}, planned {[row.samples for row in rows]}")
        for row in rows:
            wanted.setdefault(row.epoch, Counter()).update(row.samples)
            used.setdefault(row.epoch, Counter())
        for row, samples in zip(rows, found, strict=False):
            used[row.epoch].update(samples)
    for epoch, planned_samples in wanted.items():
        lost += (planned_samples - used[epoch]).total()
        repeated += (used[epoch] - planned_samples).total()
    repeated += sum(len(samples) for rows in consumed[plan.steps :] for samples in rows)
    return Trajectory(lost, repeated, tuple(problems))


def trajectory(run: Path, recipe: Recipe) -> Trajectory:
    """What the report of the training says that it consumed, against the plan."""
    report = run / "report" / "training.json"
    consumed = json.loads(report.read_text()).get("consumed")
    if consumed is None:
        return Trajectory(0, 0, (f"{report.name} does not say what was consumed",))
    return compare(consumed, planned(run, recipe))


def budget_problems(record: Mapping[str, Any], recipe: Recipe, store_bytes: int) -> list[str]:
    """Whether extraction stayed inside its window and skipped nothing. Pure.

    `store_bytes` is the most that the store held: the window, and what the checks of captures leave there.
    """
    figures, allowed = record["figures"], recipe.hidden_states.window_bytes
    peak = figures.get("train.window_peak_bytes")
    if not peak:
        return ["the record has no train.window_peak_bytes"]
    problems = [f"the window held {peak} bytes, allowed {allowed}"] if peak > allowed else []
    allowed += CHECKED_SAMPLES * recipe.hidden_states.replicas * recipe.training.row_tokens * TOKEN_BYTES
    if not 0 < store_bytes <= allowed:
        problems.append(f"the store held {store_bytes} bytes, allowed {allowed}")
    if figures.get("train.skipped_samples"):
        problems.append(f"{figures['train.skipped_samples']} samples were skipped")
    return problems


def record_problems(record: Mapping[str, Any], scenario: Scenario) -> list[str]:
    """Whether the record tells of everything that was done to the run, and ended as asked. Pure."""
    problems = []
    ended = "stopped" if scenario.shape.until else "done"
    if record["state"] != ended:
        problems.append(f"the record's state is {record['state']}, not {ended}")
    events, attempts = record.get("events", []), record["attempts"]
    causes = [event["cause"] for event in events]
    if scenario.way in (Way.KILL, Way.DAMAGE):
        for fault in scenario.faults:
            if not _CAUSES[fault.victim] & set(causes):
                problems.append(f"no event tells of the {fault.victim}; events: {causes or 'none'}")
    if scenario.way is Way.STOP and not any("SIGTERM" in (each["reason"] or "") for each in attempts):
        problems.append(f"no attempt says that it ended by SIGTERM: {[each['reason'] for each in attempts]}")
    # A run that gives up while the disk is full cannot write why; then the next one says that it found it so.
    told = any(event["cause"] == "driver" or _FULL.search(event["what"]) for event in events)
    if scenario.way is Way.FULL_DISK and not told:
        problems.append(f"no event tells of the full disk; events: {causes or 'none'}")
    if scenario.way is Way.NOTHING and events:
        problems.append(f"nothing was done to the run, and yet: {[event['what'] for event in events]}")
    return problems


def flip_a_byte(run: Path, damage: Damage) -> Path:
    """Damages an output in the middle; returns the file. The samples stand in for a checkpoint that is not there."""
    steps = sorted((run / "checkpoints").glob("step-*"))
    file = run / "samples" / "samples.parquet"
    if damage is Damage.CHECKPOINT and steps:
        file = steps[-1] / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    return file
