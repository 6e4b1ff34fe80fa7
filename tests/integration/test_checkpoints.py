"""Checkpoints on disk and in the artifact store: what is damaged, half written or elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from draftline.recipe.schema import Optimizer
from draftline.storage.local import LocalStore
from draftline.storage.store import DiskFull
from draftline.storage.workspace import Workspace
from draftline.training.checkpoint import CheckpointFolder, NoCheckpoint
from draftline.training.optimizer import Optimizers, build_optimizers

HISTORY: dict[str, list] = {"steps": [], "evaluations": [], "consumed": [[[1, 2]]]}


def trained(steps: int, size: int = 8) -> tuple[nn.Module, Optimizers]:
    torch.manual_seed(steps)
    model = nn.Linear(size, size)
    optimizers = build_optimizers(model, Optimizer())
    model(torch.ones(1, size)).sum().backward()
    optimizers.step(1.0)
    return model, optimizers


class Machine:
    """One machine's working folder; the store is in another folder, so that files really go there and back."""

    def __init__(self, root: Path, name: str) -> None:
        self.workspace = Workspace(LocalStore(root / "store"), "run", root / name)
        self.folder = root / name / "checkpoints"
        self.checkpoints = CheckpointFolder(self.folder, {"recipe": "r"}, self.workspace)

    def save(self, *steps: int) -> None:
        for step in steps:
            self.checkpoints.save(step, *trained(step), HISTORY)

    def restores(self, step: int | None) -> bool:
        model, optimizers = trained(999)
        restored = self.checkpoints.restore(model, optimizers)
        if step is None or restored is None:
            return step is None and restored is None
        same = torch.equal(model.weight, trained(step)[0].weight)
        return restored.step == step and restored.history == HISTORY and same

    def here(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def published(self) -> list[str]:
        return sorted({Path(name).parts[1] for name in self.workspace.names("checkpoints")})


@pytest.fixture
def first(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "first")


@pytest.fixture
def second(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "second")


def flip(file: Path, place: int = -10) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def in_store(root: Path, step: int, file: str) -> Path:
    return root / "store" / "run" / "checkpoints" / f"step-{step:08d}" / file


def test_the_newest_two_are_kept_here_and_there_and_another_machine_goes_on(first: Machine, second: Machine) -> None:
    assert second.restores(None)
    first.save(2, 4, 6)
    assert first.here() == first.published() == ["step-00000004", "step-00000006"]
    assert second.restores(6)
    assert second.here() == ["step-00000006"]
    second.save(8)
    assert second.published() == ["step-00000006", "step-00000008"]
    assert first.restores(8)  # it still had 6 and 4


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.pt", "history.json", "manifest.json"])
def test_what_is_damaged_here_comes_from_the_store_again(first: Machine, file: str) -> None:
    first.save(2, 4)
    flip(first.folder / "step-00000004" / file)
    assert first.restores(4)
    (note,) = first.checkpoints.damaged
    assert note.startswith("step-00000004: ") and file in note and note.endswith("taken from the store again")
    assert first.restores(4)
    assert first.checkpoints.damaged == []


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("file", ["weights.safetensors", "history.json", "manifest.json"])
def test_what_is_damaged_everywhere_is_named_and_passed_over(
    first: Machine, second: Machine, tmp_path: Path, file: str, damage: str
) -> None:
    first.save(2, 4)
    for path in (first.folder / "step-00000004" / file, in_store(tmp_path, 4, file)):
        if damage == "flip":
            flip(path)
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:-5])
        else:
            path.unlink()
    assert first.restores(2)
    assert first.checkpoints.damaged[0].startswith("step-00000004: ")
    assert file in first.checkpoints.damaged[0]
    # On a machine that has nothing, a checkpoint without a manifest is one that was never published whole.
    assert second.restores(2)
    assert len(second.checkpoints.damaged) == (0 if (file, damage) == ("manifest.json", "gone") else 1)
    # What training left behind when it went on from an older checkpoint does not come back.
    first.save(3)
    assert first.here() == first.published() == ["step-00000002", "step-00000003"]


def test_what_was_saved_but_not_published_is_published_by_who_goes_on(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    first.save(2)
    CheckpointFolder(first.folder, {"recipe": "r"}).save(4, *trained(4), HISTORY)  # killed before it was published
    in_store(tmp_path, 4, "weights.safetensors").parent.mkdir()
    shutil.copy(first.folder / "step-00000004" / "weights.safetensors", in_store(tmp_path, 4, "weights.safetensors"))
    assert second.restores(2)
    assert second.checkpoints.damaged == []
    assert first.restores(4)
    assert second.restores(4)


def test_what_is_damaged_in_the_store_is_sent_again_by_who_has_it_whole(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    first.save(2, 4)
    flip(in_store(tmp_path, 4, "weights.safetensors"))
    assert first.restores(4)
    assert second.restores(4)


def test_the_step_that_another_rank_chose_must_be_there(first: Machine, second: Machine) -> None:
    first.save(2, 4)
    model, optimizers = trained(999)
    restored = second.checkpoints.restore(model, optimizers, step=2)
    assert restored is not None and restored.step == 2
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 3"):
        second.checkpoints.restore(model, optimizers, step=3)


def test_in_a_local_store_the_folder_is_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    workspace = Workspace(LocalStore(tmp_path), "run", tmp_path / "run")
    checkpoints = CheckpointFolder(folder, {"recipe": "r"}, workspace)
    for step in (2, 4, 6):
        checkpoints.save(step, *trained(step), HISTORY)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]
    flip(folder / "step-00000006" / "optimizer.pt")
    model, optimizers = trained(999)
    restored = checkpoints.restore(model, optimizers)
    assert restored is not None and restored.step == 4
    assert checkpoints.damaged == ["step-00000006: optimizer.pt has other bytes"]


def test_what_a_killed_process_left_is_cleaned_up(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, {"recipe": "r"})
    for name in (".writing-00000002", ".leaving-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"half")
    checkpoints.save(3, *trained(3), HISTORY)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


# A checkpoint takes about 12 bytes a weight. What is on the disk already leaves room for the older checkpoint, and
# then for nothing, for a part of the weights, or for the weights and a part of the optimiser's state.
@pytest.mark.parametrize("taken_kib", [0, 240, 380])
def test_a_full_disk_leaves_the_older_checkpoints(small_disk: Path, taken_kib: int) -> None:
    checkpoints = CheckpointFolder(small_disk / "checkpoints", {"recipe": "r"})
    checkpoints.save(2, *trained(2, 224), HISTORY)
    (small_disk / "other").write_bytes(bytes(taken_kib << 10))
    with pytest.raises(DiskFull) as caught:
        checkpoints.save(4, *trained(4, 224), HISTORY)
    message = str(caught.value)
    assert message.startswith(f"cannot save the checkpoint of step 4 in {small_disk / 'checkpoints'}: the disk is full")
    assert "bytes free, about 60" in message and message.endswith("training goes on from step 2")
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000002"]
    (small_disk / "other").unlink()
    model, optimizers = trained(999, 224)
    restored = checkpoints.restore(model, optimizers)
    assert restored is not None and restored.step == 2
