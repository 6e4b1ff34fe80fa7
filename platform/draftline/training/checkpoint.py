"""Training checkpoints: everything a resumed training needs, whole or absent, the newest two kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftline.errors import RunFailed
from draftline.storage.files import sha256_tree, write_json_atomic
from draftline.training.optimizer import Optimizers

WEIGHTS, OPTIMIZER, MANIFEST = "weights.safetensors", "optimizer.pt", "manifest.json"
KEPT = 2


class CheckpointDiffers(RunFailed):
    """A checkpoint is of another recipe or model than the one that is trained now."""


class NoCheckpoint(RuntimeError):
    """A checkpoint was needed, and there is none that verifies."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint gave back besides weights and optimiser state."""

    step: int
    history: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one training: `step-00000123/` folders with a manifest of sha256.

    `identity` says what is trained (recipe hash, seed, ...); a checkpoint with another identity is refused. There is no
    RNG state to keep: every step draws from a seed that is a function of (seed, step, rank), and the scheduler's state
    is the step.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder = folder
        self._identity = json.loads(json.dumps(identity))  # compared with what JSON gives back

    def save(self, step: int, model: nn.Module, optimizers: Optimizers, history: dict[str, Any]) -> Path:
        """Writes the state after `step` steps; returns its folder."""
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".writing-{step:08d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(trainable_state(model), temporary / WEIGHTS)
        torch.save(optimizers.state_dict(), temporary / OPTIMIZER)
        manifest = {"step": step, "identity": self._identity, "files": sha256_tree(temporary), "history": history}
        write_json_atomic(temporary / MANIFEST, manifest)
        if final.exists():
            shutil.rmtree(final)
        temporary.replace(final)
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(old)
        return final

    def restore(self, model: nn.Module, optimizers: Optimizers) -> Restored | None:
        """Loads the newest checkpoint whose files verify; None when there is none. Raises `CheckpointDiffers`."""
        newest = self._newest()
        if newest is None:
            return None
        folder, manifest = newest
        load_trainable_state(model, load_file(folder / WEIGHTS))
        optimizers.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))
        return Restored(manifest["step"], manifest["history"])

    def restore_weights(self, model: nn.Module) -> int:
        """Loads only the newest checkpoint's weights; returns its step. Raises `NoCheckpoint`, `CheckpointDiffers`."""
        newest = self._newest()
        if newest is None:
            raise NoCheckpoint(f"{self._folder} holds no checkpoint whose files verify")
        folder, manifest = newest
        load_trainable_state(model, load_file(folder / WEIGHTS))
        return int(manifest["step"])

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        for folder in reversed(self._steps()):
            manifest = _verified_manifest(folder)
            if manifest is None:
                continue
            if manifest["identity"] != self._identity:
                raise CheckpointDiffers(f"{folder} is of {manifest['identity']}, this training is {self._identity}")
            return folder, manifest
        return None

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))


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


def _verified_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = {name: digest for name, digest in sha256_tree(folder).items() if name != MANIFEST}
    return manifest if found == manifest["files"] else None
