"""The export check: what lies in the folder is the draft that was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.drafts.export import CONFIG, ExportFailed, is_draft_file
from draftline.drafts.manifest import MANIFEST, DraftManifest

if TYPE_CHECKING:
    from draftline.training.model import Accelerator, DraftModel
    from draftline.training.rows import SampleStates

# speculators leaves the target's own weights out of a draft and takes them from the target again.
NEVER_SAVED = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
ANCHORS_PER_SAMPLE = 64


class DraftMismatch(ExportFailed):
    """The exported draft drafts other tokens than the trained model."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was compared."""

    samples: int
    anchors: int
    drafted_tokens: int


def check_export(
    folder: Path,
    trained: DraftModel,
    target: Path,
    samples: Sequence[SampleStates],
    *,
    accelerator: Accelerator = "cpu",
) -> ExportReport:
    """Checks the files, loads the draft strictly, and compares its drafts with the trained model's on `samples`.

    `target` is the target's local folder. Raises `ExportFailed` or `DraftMismatch`.
    """
    from torch import nn

    from draftline.training.model import load_draft
    from draftline.training.walk import draft_choices

    check_files(folder)
    loaded, loading = load_draft(folder, target, accelerator=accelerator)
    full_vocabulary = loaded.d2t is None
    check_loading(loading, NEVER_SAVED | ({"lm_head.weight"} if full_vocabulary else set()))
    nn.Module.to(loaded, trained.fc.weight.device)
    anchors_compared = drafted = 0
    for number, sample in enumerate(samples):
        every = range(sample.prompt_tokens, len(sample.token_ids))
        anchors = list(every)[:: max(1, len(every) // ANCHORS_PER_SAMPLE)]
        wanted = draft_choices(trained, sample.hidden_states, sample.token_ids, anchors)
        found = draft_choices(loaded, sample.hidden_states, sample.token_ids, anchors)
        for anchor, want, have in zip(anchors, wanted, found, strict=True):
            if want != have:
                raise DraftMismatch(
                    f"held-out sample {number}, position {anchor}: the trained model drafts {want}, the export {have}"
                )
        anchors_compared += len(anchors)
        drafted += sum(map(len, wanted))
    return ExportReport(len(samples), anchors_compared, drafted)


def check_files(folder: Path) -> None:
    """Safetensors only, each file as the manifest says, a configuration that names no code. Raises `ExportFailed`."""
    strange = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST and not is_draft_file(path.name))
    if strange:
        raise ExportFailed(f"{folder} holds files that no draft has: {', '.join(strange)}")
    damaged = DraftManifest.read(folder).damaged(folder)
    if damaged:
        raise ExportFailed(f"{folder}: not as the manifest says: {', '.join(damaged)}")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for field in ("sample_from_anchor", "sliding_window_non_causal"):
        if field not in config:
            raise ExportFailed(f"{folder / CONFIG} has no {field}, which vLLM would take for False")
    if "auto_map" in config:
        raise ExportFailed(f"{folder / CONFIG} names code to load (auto_map)")


def check_loading(loading: dict[str, Any], may_miss: set[str]) -> None:
    """Nothing missing but the target's own weights, nothing unexpected or misshapen. Raises `ExportFailed`."""
    problems = {
        "missing": sorted(set(loading["missing_keys"]) - may_miss),
        "unexpected": sorted(set(loading["unexpected_keys"])),
        "of another shape": sorted(str(key) for key in loading["mismatched_keys"]),
        "not loaded": sorted(str(error) for error in loading.get("error_msgs", ())),
    }
    found = [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]
    if found:
        raise ExportFailed(f"the exported draft does not load strictly; {'; '.join(found)}")
