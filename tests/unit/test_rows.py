"""Samples in Parquet."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftline.samples.rows import Sample, read_samples, write_samples

SAMPLES = [
    Sample(3, "maths", False, (5, 6, 7, 163839), 2, "stop"),
    Sample(1, "wörter", True, (8,), 1, "length"),
]


def test_samples_read_back_equal_and_in_order(tmp_path: Path) -> None:
    file = tmp_path / "samples" / "samples.parquet"
    write_samples(file, iter(SAMPLES))
    assert read_samples(file) == SAMPLES
    assert [path.name for path in file.parent.iterdir()] == ["samples.parquet"]


def test_no_samples_are_samples_too(tmp_path: Path) -> None:
    write_samples(tmp_path / "none.parquet", [])
    assert read_samples(tmp_path / "none.parquet") == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "samples.parquet"
    write_samples(file, SAMPLES)
    with pytest.raises(pa.ArrowInvalid):
        write_samples(file, [Sample(1, "x", False, (2**31,), 1, "stop")])
    assert read_samples(file) == SAMPLES
    assert list(tmp_path.iterdir()) == [file]


def test_another_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"number": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="does not hold samples"):
        read_samples(tmp_path / "other.parquet")


def test_the_mask_covers_the_states_that_predict_the_answer() -> None:
    assert SAMPLES[0].loss_mask == (False, True, True, False)
    assert SAMPLES[0].answer_tokens == 2
    assert SAMPLES[1].loss_mask == (False,)
