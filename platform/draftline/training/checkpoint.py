"""Training checkpoints: everything a resumed training needs, whole or absent, the newest two kept."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftline.errors import RunFailed
from draftline.storage.keys import join
from draftline.storage.store import DiskFull, NotFound
from draftline.storage.workspace import MANIFEST, Workspace
from draftline.training.checkpoint_files import (
    CheckpointDamaged,
    Manifest,
    folder_name,
    parse_manifest,
    rename_on_disk,
    step_of,
    verified,
    write_manifest,
)
from draftline.training.optimizer import Optimizers
from draftline.training.records import write_history

WEIGHTS, OPTIMIZER, HISTORY = "weights.safetensors", "optimizer.pt", "history.json"
KEPT = 2
# Folders under these names are never checkpoints: one that is being written, and those on their way out.
_WRITING, _LEAVING = ".writing-", ".leaving-"

log = logging.getLogger(__name__)


class CheckpointDiffers(RunFailed):
    """A checkpoint is of another recipe or model than the one that is trained now."""


class NoCheckpoint(RunFailed):
    """A checkpoint was needed, and there is none that verifies."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint gave back besides weights and optimiser state."""

    step: int
    history: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one training: `step-00000123/` folders with a manifest of sha256.

    `identity` says what is trained (recipe hash, seed, ...); a checkpoint with another identity is refused. With a
    `workspace`, which the folder lies in, each checkpoint is published to the artifact store, and one that lies only
    there is found and fetched. `damaged` names those that were passed over, and why.

    There is no RNG state to keep: torch's is seeded before every forward pass by a function of (seed, step, rank),
    which also covers a dropout if a model had one; neither the backward pass nor an optimiser draws, and nothing uses
    Python's or numpy's. The scheduler's state is the step.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], workspace: Workspace | None = None) -> None:
        self._folder = folder
        self._identity = json.loads(json.dumps(identity))  # compared with what JSON gives back
        self._workspace = workspace
        self.damaged: list[str] = []

    def save(self, step: int, model: nn.Module, optimizers: Optimizers, history: Mapping[str, Sequence[Any]]) -> Path:
        """Writes the state after `step` steps and publishes it; returns its folder.

        Older checkpoints but the newest are then removed, and so are those of later steps: training left them behind.
        Raises DiskFull; what was there before is then still there.
        """
        final = self._folder / folder_name(step)
        temporary = self._folder / f"{_WRITING}{step:08d}"
        self._clean()
        weights, state = trainable_state(model), optimizers.state_dict()
        with self._writing(step, temporary, _size(weights) + _size(state)):
            save_file(weights, temporary / WEIGHTS)
            with (temporary / OPTIMIZER).open("wb") as file:  # torch's own file would stay open after an error
                torch.save(state, file)
            write_history(temporary / HISTORY, history)
            write_manifest(temporary, step, self._identity)
            if final.exists():
                self._leave(final)
            rename_on_disk(temporary, final)
        if self._workspace is not None:
            self._workspace.publish_folder(final)
        self._prune(step)
        return final

    def restore(self, model: nn.Module, optimizers: Optimizers, step: int | None = None) -> Restored | None:
        """Loads the newest checkpoint that is whole, here or in the store; None when there is none.

        With `step`, that one (another rank has chosen it). Raises `CheckpointDiffers`, `NoCheckpoint`.
        """
        chosen = self._choose(step)
        if chosen is None:
            if step is not None:
                raise NoCheckpoint(f"{self._folder}: no checkpoint of step {step}: {'; '.join(self.damaged)}")
            return None
        folder, manifest = chosen
        if step is None:
            self._publish(folder)
        load_trainable_state(model, load_file(folder / WEIGHTS))
        optimizers.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))
        return Restored(manifest.step, json.loads((folder / HISTORY).read_text(encoding="utf-8")))

    def restore_weights(self, model: nn.Module) -> int:
        """Loads only the newest checkpoint's weights; returns its step. Raises `NoCheckpoint`, `CheckpointDiffers`."""
        chosen = self._choose(None)
        if chosen is None:
            found = "; ".join(self.damaged) or "none was saved"
            raise NoCheckpoint(f"{self._folder} holds no checkpoint whose files verify: {found}")
        folder, manifest = chosen
        load_trainable_state(model, load_file(folder / WEIGHTS))
        return manifest.step

    @contextmanager
    def _writing(self, step: int, temporary: Path, needed_bytes: int) -> Iterator[None]:
        try:
            temporary.mkdir(parents=True)
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            # Only Python's own writes say what the operating system said; torch's and safetensors' do not.
            free = shutil.disk_usage(self._folder if self._folder.exists() else self._folder.parent).free
            if free >= needed_bytes and getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
                raise
            steps = self._local_steps()
            before = f"goes on from step {max(steps)}" if steps else "begins again"
            raise DiskFull(
                f"cannot save the checkpoint of step {step} in {self._folder}: the disk is full ({free:,} bytes free, "
                f"about {needed_bytes:,} needed). Make room there and start the run again: training {before}"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _choose(self, step: int | None) -> tuple[Path, Manifest] | None:
        self.damaged = []
        published = self._published_steps()
        steps = sorted(self._local_steps() | published, reverse=True) if step is None else [step]
        for each in steps:
            folder = self._folder / folder_name(each)
            try:
                manifest = self._whole(folder, each in published)
            except CheckpointDamaged as error:
                self._note(folder, str(error))
                continue
            if manifest.identity != self._identity:
                raise CheckpointDiffers(f"{folder} is of {manifest.identity}, this training is {self._identity}")
            return folder, manifest
        return None

    def _whole(self, folder: Path, published: bool) -> Manifest:
        """The manifest of a checkpoint that is whole here, with the store's help when needed."""
        if not folder.is_dir():
            return self._fetch(folder)
        try:
            return verified(folder)
        except CheckpointDamaged as problem:
            if not published:
                raise
            try:
                manifest = self._fetch(folder)
            except CheckpointDamaged:
                raise problem from None
            self._note(folder, f"{problem}; taken from the store again")
            return manifest

    def _fetch(self, folder: Path) -> Manifest:
        if self._workspace is None:
            raise CheckpointDamaged("it is not here")
        name = self._workspace.name(folder)
        try:
            data = self._workspace.store.read(join(self._workspace.prefix, f"{name}/{MANIFEST}")).data
        except NotFound as error:
            raise CheckpointDamaged(f"{MANIFEST} is missing") from error
        outputs = {f"{name}/{file}": digest for file, digest in parse_manifest(data).files.items()}
        outputs[f"{name}/{MANIFEST}"] = hashlib.sha256(data).hexdigest()
        if bad := self._workspace.fetch(outputs):
            raise CheckpointDamaged(f"missing or damaged in the store: {', '.join(bad)}")
        return verified(folder)

    def _publish(self, folder: Path) -> None:
        """A worker that was killed between saving and publishing left a checkpoint that only this machine has; and the
        store's copy may be damaged where this machine's is whole."""
        if self._workspace is not None:
            self._workspace.publish_folder(folder)

    def _note(self, folder: Path, problem: str) -> None:
        self.damaged.append(f"{folder.name}: {problem}")
        log.warning("checkpoint %s is damaged: %s", folder, problem)

    def _prune(self, done: int) -> None:
        kept = set(sorted(step for step in self._local_steps() if step <= done)[-KEPT:])
        for step in self._local_steps() - kept:
            self._leave(self._folder / folder_name(step))
        self._clean()
        if self._workspace is not None:
            names = self._published_names()
            self._workspace.remove(*(name for name in names if step_of(Path(name).parts[-2]) not in kept))

    def _leave(self, folder: Path) -> None:
        """Takes a checkpoint's name away in one step: one that is half removed must not look like a damaged one."""
        rename_on_disk(folder, folder.with_name(f"{_LEAVING}{folder.name}"))

    def _clean(self) -> None:
        for pattern in (f"{_WRITING}*", f"{_LEAVING}*"):
            for folder in self._folder.glob(pattern):
                shutil.rmtree(folder)

    def _local_steps(self) -> set[int]:
        found = {step_of(path.name) for path in self._folder.glob("step-*") if path.is_dir()}
        return {step for step in found if step is not None}

    def _published_steps(self) -> set[int]:
        """Of the checkpoints that the store has whole: the manifest comes last."""
        found = {step_of(Path(name).parts[-2]) for name in self._published_names() if Path(name).name == MANIFEST}
        return {step for step in found if step is not None}

    def _published_names(self) -> list[str]:
        if self._workspace is None:
            return []
        below = self._workspace.name(self._folder)
        return [name for name in self._workspace.names(below) if step_of(Path(name).parts[-2]) is not None]


def _size(state: Any) -> int:
    """Bytes of all tensors in nested dictionaries and lists."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_size(value) for value in values)


def trainable_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that training changes, by name; the frozen ones come from the target again."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def load_trainable_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Puts back what `trainable_state` returned; ValueError when names differ."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if set(weights) != set(state):
        raise ValueError(f"the checkpoint's weights differ in {sorted(set(weights) ^ set(state))}")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(state[name])
