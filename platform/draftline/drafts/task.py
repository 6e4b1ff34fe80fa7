"""Export as a task: the newest checkpoint in, a checked draft folder out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftline.drafts.manifest import Provenance
from draftline.recipe.schema import Recipe
from draftline.storage.workspace import Workspace

READ_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ExportSpec:
    """Paths are absolute. `samples` are (manifest, prompt tokens) of captured held-out samples."""

    recipe: Recipe
    target: str
    kept_tokens: tuple[int, ...] | None
    mask_token_id: int
    checkpoints: str
    draft: str
    provenance: Provenance
    metrics: Mapping[str, float]
    samples: Sequence[tuple[Mapping[str, Any], int]]
    store: Any
    workspace: Workspace


def run_export(spec: ExportSpec) -> dict[str, int]:
    """Exports, checks, publishes; returns what was compared. Raises `ExportFailed`, `DraftMismatch`, `StatesLost`."""
    from draftline.drafts.check import check_export
    from draftline.drafts.export import export_draft
    from draftline.hidden_states.store import StatesReader
    from draftline.training.checkpoint import CheckpointFolder
    from draftline.training.model import build_draft
    from draftline.training.rows import SampleStates

    recipe = spec.recipe
    accelerator = recipe.resources.accelerator
    model = build_draft(
        recipe.draft, Path(spec.target), spec.kept_tokens, spec.mask_token_id, accelerator=accelerator, seed=recipe.seed
    )
    checkpoints = CheckpointFolder(Path(spec.checkpoints), spec.provenance.identity(recipe.seed), spec.workspace)
    checkpoints.restore_weights(model)
    reader = StatesReader(spec.store)
    samples = []
    for manifest, prompt_tokens in spec.samples:
        states = reader.read(manifest, READ_TIMEOUT_S)
        reader.delete(manifest["handle"])
        samples.append(SampleStates(states["hidden_states"], states["token_ids"], prompt_tokens))
    export_draft(model, Path(spec.draft), spec.provenance, spec.metrics)
    report = check_export(Path(spec.draft), model, Path(spec.target), samples, accelerator=accelerator)
    spec.workspace.publish_folder(Path(spec.draft))
    return asdict(report)
