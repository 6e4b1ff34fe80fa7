"""Files are whole or absent, and their checksums find every change."""

import hashlib
import json
from pathlib import Path

import pytest

from draftline.storage.artifacts import store_url
from draftline.storage.files import atomic_path, sha256_file, sha256_tree, write_json_atomic, write_text_atomic


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"draft")
    assert sha256_file(tmp_path / "a.bin") == hashlib.sha256(b"draft").hexdigest()


def test_tree_is_sorted_and_relative(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    tree = sha256_tree(tmp_path)
    assert list(tree) == ["a/b/c.txt", "a/z.txt", "b.txt"]
    assert tree["b.txt"] == hashlib.sha256(b"b.txt").hexdigest()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_text_atomic(file, "old")
    with pytest.raises(RuntimeError), atomic_path(file) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "record.json"
    write_json_atomic(file, {"ä": 1})
    with pytest.raises(TypeError):
        write_json_atomic(file, {"bad": object()})
    assert json.loads(file.read_text(encoding="utf-8")) == {"ä": 1}
    assert len(list(file.parent.iterdir())) == 1


def test_a_store_in_an_uploaded_working_directory_outlives_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_url("runs") == str(tmp_path / "runs")
    uploaded = tmp_path / "working_dir_files" / "_ray_pkg_1"
    uploaded.mkdir(parents=True)
    monkeypatch.chdir(uploaded)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store_url("runs") == str(tmp_path / "home" / "draftline" / "runs")
    assert store_url(str(tmp_path / "shared")) == str(tmp_path / "shared")
    assert store_url("s3://bucket/drafts") == "s3://bucket/drafts"
