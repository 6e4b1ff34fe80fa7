import json
from pathlib import Path

import pytest

from draftline.training.checkpoint_files import (
    CheckpointDamaged,
    folder_name,
    parse_manifest,
    step_of,
    verified,
    write_manifest,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / folder_name(12)
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(b"w" * 100)
    (folder / "history.json").write_text('{"steps": []}')
    write_manifest(folder, 12, {"recipe": "r"})
    return folder


def test_a_whole_checkpoint_verifies(checkpoint: Path) -> None:
    manifest = verified(checkpoint)
    assert (manifest.step, manifest.identity, len(manifest.files)) == (12, {"recipe": "r"}, 2)
    # what an interrupted download leaves is nobody's file
    (checkpoint / ".weights.safetensors.abc.tmp").write_bytes(b"part")
    assert verified(checkpoint) == manifest


def test_any_changed_byte_of_the_manifest_is_noticed(checkpoint: Path) -> None:
    data = (checkpoint / "manifest.json").read_bytes()
    harmless = 0
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        try:
            assert parse_manifest(changed) == parse_manifest(data), place
            harmless += 1
        except CheckpointDamaged as error:
            assert str(error)
    assert harmless <= data.count(b"\n") + data.count(b" ")  # no more than the layout between the values
    for end in range(len(data) - 1):
        with pytest.raises(CheckpointDamaged):
            parse_manifest(data[:end].rstrip())
    values = json.loads(data)
    with pytest.raises(CheckpointDamaged, match="does not match its own sha256"):
        parse_manifest(json.dumps(values | {"step": 13}).encode())
    with pytest.raises(CheckpointDamaged, match="is no manifest"):
        parse_manifest(json.dumps({"step": 13, "identity": {}, "files": {}}).encode())
    with pytest.raises(CheckpointDamaged, match="is no manifest"):
        parse_manifest(b"[1, 2]")


def test_damage_to_files_is_named(checkpoint: Path) -> None:
    (checkpoint / "weights.safetensors").write_bytes(b"w" * 99 + b"x")
    (checkpoint / "history.json").rename(checkpoint / "other.json")
    with pytest.raises(CheckpointDamaged) as caught:
        verified(checkpoint)
    assert str(caught.value) == (
        "history.json is missing; other.json does not belong to it; weights.safetensors has other bytes"
    )
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing"):
        verified(checkpoint)


def test_only_checkpoints_have_a_step() -> None:
    assert step_of(folder_name(123)) == 123
    assert step_of("step-123456789") == 123456789
    assert [step_of(name) for name in (".writing-00000012", "step-x", "step-00000012.tmp")] == [None] * 3
