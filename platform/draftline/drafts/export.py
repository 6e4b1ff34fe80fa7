"""Export: a trained draft becomes a folder in speculators' format that vLLM serves, and nothing else is in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.drafts.manifest import DraftManifest, Provenance, draft_files
from draftline.errors import RunFailed
from draftline.storage.files import write_json_atomic

if TYPE_CHECKING:
    from draftline.training.model import DraftModel

CONFIG = "config.json"
MODEL_CLASS = "DSparkDraftModel"  # speculators' own class: ours only trains


class ExportFailed(RunFailed):
    """What was exported is not what it must be."""


def export_draft(
    model: DraftModel, folder: Path, provenance: Provenance, metrics: Mapping[str, float]
) -> DraftManifest:
    """Writes `model` (float32) and its manifest to `folder`, whole or not at all; what was there is replaced.

    `provenance.target` is the name of the target that serving uses. Raises `ExportFailed`.
    """
    temporary = folder.with_name(f".{folder.name}.exporting")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    local_target = str(model.config.speculators_config.verifier.name_or_path)
    config = served_config(json.loads((temporary / CONFIG).read_text(encoding="utf-8")), model, provenance.target)
    if local_target != provenance.target and local_target in json.dumps(config):
        raise ExportFailed(f"config.json still names the local folder {local_target}")
    write_json_atomic(temporary / CONFIG, config)
    for path in temporary.iterdir():
        if not is_draft_file(path.name):
            path.unlink()
    manifest = DraftManifest(provenance, model.max_draft_tokens, dict(metrics), draft_files(temporary))
    manifest.write(temporary)
    _replace_folder(temporary, folder)
    return manifest


def is_draft_file(name: str) -> bool:
    """Whether a draft's folder may hold a file of this name: its configuration, or safetensors (one or many)."""
    return name == CONFIG or name.endswith((".safetensors", ".safetensors.index.json"))


def served_config(config: dict[str, Any], model: DraftModel, target: str) -> dict[str, Any]:
    """The configuration as vLLM shall read it: no code to load, the target by name, every default spelt out."""
    cleaned = _without(config, {"auto_map", "_name_or_path"})
    cleaned["architectures"] = [MODEL_CLASS]
    cleaned["speculators_config"]["verifier"]["name_or_path"] = target
    # vLLM takes a missing field for False: a draft trained from the anchor would be read one slot off.
    cleaned["sample_from_anchor"] = bool(model.config.sample_from_anchor)
    cleaned["sliding_window_non_causal"] = bool(model.config.sliding_window_non_causal)
    return cleaned


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(part, keys) for key, part in value.items() if key not in keys}
    return [_without(part, keys) for part in value] if isinstance(value, list) else value


def _replace_folder(new: Path, folder: Path) -> None:
    """`new` takes the name `folder`. A folder cannot be renamed over a full one, so the old one steps aside first."""
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
