"""Export and export check, on a draft of the tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.drafts.check import DraftMismatch, check_export, check_files
from draftline.drafts.export import ExportFailed, export_draft
from draftline.drafts.manifest import DraftManifest, Provenance, draft_files
from draftline.recipe.schema import Draft
from draftline.training.model import DraftModel, build_draft
from draftline.training.rows import SampleStates
from states import TinyTarget, tiny_samples
from tiny import TAP_LAYERS, UNUSED_TOKEN

PROVENANCE = Provenance("tiny", "a" * 64, "b" * 64, {"torch": torch.__version__})


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[SampleStates]:
    torch.set_num_threads(1)
    return tiny_samples(TinyTarget(tiny_target), 2, TAP_LAYERS)


def make_draft(target: Path, **fields: object) -> DraftModel:
    shape = Draft(layers=1, tap_layers=list(TAP_LAYERS), block_size=4, markov_rank=8, **fields)  # type: ignore[arg-type]
    kept = range(2, 130) if "vocab_size" in fields else None
    model = build_draft(shape, target, kept, UNUSED_TOKEN, accelerator="cpu", seed=1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad and weight.dim() == 2:
                weight.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize(
    "fields",
    [{"vocab_size": 128}, {}, {"block_layout": "one_plus_n"}, {"sliding_window": 8}],
    ids=["reduced", "full vocabulary", "1+N", "sliding"],
)
def test_the_export_is_clean_and_drafts_what_the_model_drafts(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path, fields: dict
) -> None:
    folder = tmp_path / "draft"
    model = make_draft(tiny_target, **fields)
    export_draft(model, folder, PROVENANCE, {"eal_held_out": 1.5})
    manifest = export_draft(model, folder, PROVENANCE, {"eal_held_out": 1.7})  # replaces the first
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    assert DraftManifest.read(folder) == manifest and manifest.metrics["eal_held_out"] == 1.7
    text = (folder / "config.json").read_text()
    assert str(tiny_target) not in text and "auto_map" not in text
    config = json.loads(text)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    anchor_first = fields.get("block_layout") != "one_plus_n"
    assert config["sample_from_anchor"] is anchor_first
    assert config["sliding_window_non_causal"] is ("sliding_window" not in fields)
    assert manifest.draft_tokens == (4 if anchor_first else 3)

    report = check_export(folder, model, tiny_target, samples)
    assert report.samples == 2 and report.anchors > 40
    assert report.drafted_tokens == report.anchors * manifest.draft_tokens


def test_vllm_reads_the_configuration_as_it_was_trained(tiny_target: Path, tmp_path: Path) -> None:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    export_draft(make_draft(tiny_target, vocab_size=128), tmp_path / "draft", PROVENANCE, {})
    read = SpeculatorsConfig.from_pretrained(tmp_path / "draft")
    assert read.sample_from_anchor is True and read.dspark_bonus_anchor is False
    assert read.architectures == ["Qwen3DSparkModel"]
    assert (read.draft_vocab_size, read.block_size, read.markov_rank, read.mask_token_id) == (128, 4, 8, UNUSED_TOKEN)
    assert read.eagle_aux_hidden_state_layer_ids == list(TAP_LAYERS)
    assert read.enable_confidence_head and read.confidence_head_with_markov


def test_a_strange_missing_or_changed_file_is_found(tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    export_draft(make_draft(tiny_target), folder, PROVENANCE, {})
    check_files(folder)
    (folder / "config.py").write_text("import os")
    with pytest.raises(ExportFailed, match=r"files that no draft has: config\.py"):
        check_files(folder)
    (folder / "config.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["sample_from_anchor"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportFailed, match=r"not as the manifest says: config\.json"):
        check_files(folder)
    sign(folder)
    with pytest.raises(ExportFailed, match="has no sample_from_anchor"):
        check_files(folder)


def sign(folder: Path) -> None:
    DraftManifest(PROVENANCE, 4, {}, draft_files(folder)).write(folder)


def test_weights_that_are_not_the_trained_ones_are_found(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    model = make_draft(tiny_target)
    export_draft(model, folder, PROVENANCE, {})
    weights = load_file(folder / "model.safetensors")

    changed = weights | {"fc.weight": torch.randn(weights["fc.weight"].shape)}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    sign(folder)
    with pytest.raises(DraftMismatch, match=r"held-out sample 0, position \d+: the trained model drafts \["):
        check_export(folder, model, tiny_target, samples)

    lost = {name: weight for name, weight in weights.items() if name != "markov_head.markov_w2.weight"}
    save_file(lost | {"stray.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    sign(folder)
    with pytest.raises(ExportFailed, match=r"missing: markov_head\.markov_w2\.weight; unexpected: stray\.weight"):
        check_export(folder, model, tiny_target, samples)
