"""What a training pays for being able to survive: `make bench-protection` prints the ratio.

Two trainings of the quickstart's shape take turns, block of steps by block of steps, in one process, through one
Mooncake store. The protected one does what a train worker does: it writes and verifies checksums and compares token
digests, adds up in the same order every time, keeps its trajectory, writes a checkpoint every `--checkpoint` steps and
the run record once a second. The bare one does none of it. `--parts` says what a single part costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from hs_connectors.mooncake_store import (
    VERSION,
    MooncakeHiddenStatesStore,
    MooncakeStoreConfig,
    packed_layout,
)
from loguru import logger

from draftline.hidden_states.checksum import add_checksum
from draftline.hidden_states.master import MasterProcess
from draftline.hidden_states.store import StatesReader, StoreConfig, local_address, quiet_environment
from draftline.hidden_states.writer import PatientStore
from draftline.recipe.schema import Draft, Optimizer, Recipe, Training
from draftline.runs.record import open_run
from draftline.storage.local import LocalStore
from draftline.training.checkpoint import CheckpointFolder
from draftline.training.loop import LoopSettings, Trainer
from draftline.training.model import build_draft
from draftline.training.reproducible import make_reproducible
from draftline.training.rows import SampleStates
from draftline.training.spec import token_digest
from tiny import UNUSED_TOKEN, build_tiny_target

TAPS = (2, 3, 5)
HIDDEN, VOCABULARY, KEPT = 576, 16384, 8192
ROW_TOKENS, PROMPT_TOKENS = 448, 60
RECORD_EVERY_S = 1.0
THREADS = 2
PARTS = ("states", "reproducible", "checkpoints", "record")  # what a protected training does more


class NoCheckpoints(CheckpointFolder):
    """Saves nothing."""

    def save(self, *_: Any) -> Path:
        return Path()


class Rows:
    """Writes each step's row to the store and reads it back, protected or as hs-connectors does it alone."""

    def __init__(self, config: StoreConfig, states: torch.Tensor, token_ids: torch.Tensor, tag: str) -> None:
        self._settings = MooncakeStoreConfig.from_dict(config.connector_config())
        self._states, self._token_ids, self._tag, self._count = states, token_ids, tag, 0

    def row(self, step: int) -> Sequence[SampleStates]:
        self._count += 1
        manifest = self._manifest(f"{self._tag}-{self._count}")
        read = self._travel(manifest, {"hidden_states": self._states, "token_ids": self._token_ids})
        return [SampleStates(read["hidden_states"], read["token_ids"], PROMPT_TOKENS, step)]

    def _manifest(self, handle: str) -> dict[str, Any]:
        layout, size = packed_layout(
            {
                "hidden_states": (tuple(self._states.shape), self._states.dtype),
                "token_ids": (tuple(self._token_ids.shape), self._token_ids.dtype),
            }
        )
        sizes = {"num_tokens": len(self._token_ids), "total_aligned_bytes": size}
        return {"handle": handle, "version": VERSION, "tensors": layout, "metadata": sizes}

    def _travel(self, manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def commit(self, step: int) -> None: ...


class BareRows(Rows):
    def __init__(self, config: StoreConfig, *rest: Any) -> None:
        super().__init__(config, *rest)
        self._settings.local_hostname = local_address(config.master_address)
        self._store = MooncakeHiddenStatesStore(self._settings).setup()

    def _travel(self, manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._store.put_sample(manifest, tensors)
        read = self._store.get_sample(manifest, timeout=10.0)
        self._store.delete_sample(manifest["handle"])
        return read


class ProtectedRows(Rows):
    def __init__(self, config: StoreConfig, *rest: Any) -> None:
        super().__init__(config, *rest)
        self._store = PatientStore(self._settings).setup()
        self._reader = StatesReader(config)
        self._digest = token_digest(self._token_ids.tolist())

    def _travel(self, manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._store.put_sample(add_checksum(manifest), tensors)
        read = self._reader.read(manifest, 10.0)
        if token_digest(read["token_ids"].tolist()) != self._digest:
            raise RuntimeError("the token ids are other ones")
        self._reader.delete(manifest["handle"])
        return read


class Record:
    """Writes a run record at most once a second, as the driver does while it watches a training."""

    def __init__(self, folder: Path) -> None:
        values = {
            "run_id": "bench",
            "target": {"path": "target"},
            "data": {"prompts": "prompts.jsonl"},
            "draft": {"tap_layers": list(TAPS)},
        }
        self._stored = open_run(LocalStore(folder), Recipe.model_validate(values))
        self._written_at = time.monotonic()

    def update(self, figures: dict[str, Any]) -> None:
        if time.monotonic() - self._written_at >= RECORD_EVERY_S:
            self._written_at = time.monotonic()
            self._stored.record.figures["train.step"] = figures["step"]
            self._stored.write()


def set_reproducible(on: bool) -> None:
    """As a train worker makes itself, or as torch is by default; for the whole process, until the next call."""
    make_reproducible(THREADS)
    torch.use_deterministic_algorithms(on)


def block_seconds(target: Path, folder: Path, rows: Rows, steps: int, checkpoint: int, parts: Collection[str]) -> float:
    """Trains a fresh draft for so many steps, protected in these parts; returns the seconds of the training alone."""
    set_reproducible("reproducible" in parts)
    shape = Draft(tap_layers=list(TAPS), vocab_size=KEPT)
    model = build_draft(shape, target, tuple(range(KEPT)), UNUSED_TOKEN, accelerator="cpu", seed=0)
    saves = "checkpoints" in parts
    recipe = Training(
        max_anchors=80,
        row_tokens=512,
        evaluate_every_steps=10**9,
        checkpoint_every_steps=checkpoint if saves else 10**9,
        optimizer=Optimizer(lr=1e-3),
    )
    kind = CheckpointFolder if saves else NoCheckpoints
    report = Record(folder / "runs").update if "record" in parts else lambda _: None
    trainer = Trainer(model, recipe, LoopSettings(steps, 0), kind(folder / "checkpoints", {}), report)
    began = time.perf_counter()
    trainer.run(rows, [])
    return time.perf_counter() - began


def main() -> int:
    os.environ.update(quiet_environment())
    logger.disable("speculators")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="how often the two take turns (default: 4)")
    parser.add_argument("--steps", type=int, default=40, help="steps of one turn (default: 40)")
    parser.add_argument("--checkpoint", type=int, default=40, help="steps between checkpoints (default: 40)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help=f"what the protected one does (default: {PARTS})"
    )
    return run(parser.parse_args())


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = build_tiny_target(folder / "target", layers=6, hidden=HIDDEN, vocab=VOCABULARY)
        master = MasterProcess(folder / "master.log", "127.0.0.1")
        try:
            return _compare(options, folder, target, StoreConfig(master.start(), segment_bytes=64 << 20))
        finally:
            master.stop()


def _compare(options: argparse.Namespace, folder: Path, target: Path, config: StoreConfig) -> int:
    states = torch.randn(ROW_TOKENS, len(TAPS) + 1, HIDDEN)
    token_ids = torch.randint(8, 200, (ROW_TOKENS,))
    bare, kept = BareRows(config, states, token_ids, "bare"), ProtectedRows(config, states, token_ids, "kept")
    ratios = []
    for pair in range(options.pairs + 1):
        turns: list[tuple[str, Rows, Collection[str]]] = [
            ("bare", bare, ()),
            ("protected", kept if "states" in options.parts else bare, options.parts),
        ]
        seconds = {
            kind: block_seconds(target, folder / f"{kind}-{pair}", rows, options.steps, options.checkpoint, parts)
            for kind, rows, parts in (turns if pair % 2 else reversed(turns))
        }
        ratio = seconds["protected"] / seconds["bare"]
        note = "warm-up, not counted" if pair == 0 else f"ratio {ratio:.4f}"
        print(f"bare {seconds['bare']:.2f} s, protected {seconds['protected']:.2f} s: {note}", flush=True)
        ratios += [ratio] if pair else []
    print(
        f"protection ({', '.join(options.parts)}) costs a factor of {statistics.median(ratios):.4f} (median of "
        f"{len(ratios)} pairs, {min(ratios):.4f} to {max(ratios):.4f}), checkpoint every {options.checkpoint} steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
