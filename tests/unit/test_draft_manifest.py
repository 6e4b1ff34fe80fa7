from pathlib import Path

import pytest

from draftline.drafts.manifest import DraftManifest, Provenance, draft_files


def _manifest(folder: Path) -> DraftManifest:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    manifest = DraftManifest(
        Provenance("smollm2", "a" * 64, "b" * 64, {"torch": "2.13.0"}), 8, {"eal_held_out": 1.7}, draft_files(folder)
    )
    manifest.write(folder)
    return manifest


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    assert DraftManifest.read(tmp_path) == manifest
    assert manifest.damaged(tmp_path) == []
    assert set(manifest.files) == {"config.json", "model.safetensors"}


def test_every_difference_is_found(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.py").write_text("import os")
    assert manifest.damaged(tmp_path) == ["config.json", "config.py", "model.safetensors"]


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"provenance": {"target": "x"}}')
    with pytest.raises(ValueError, match="is no manifest of a draft"):
        DraftManifest.read(tmp_path)
