import json
from pathlib import Path

import pytest

from draftline.training.records import EvaluationRecord, History, StepRecord, data_wait_share, write_history
from draftline.training.trajectory import Trajectory


def _step(step: int, wait_s: float) -> StepRecord:
    return StepRecord(step, 1.0, 1.1, 1.2, 1e-3, 100, 50, wait_s, 0.2, 0.5, 0.1)


def test_the_wait_share_leaves_out_the_warm_up() -> None:
    slow_start = [_step(step, 10.0 if step < 5 else 0.2) for step in range(20)]
    assert data_wait_share(slow_start) == pytest.approx(0.2)
    assert data_wait_share(slow_start[:5]) == 0.0
    many = [_step(step, 10.0 if step < 10 else 0.0) for step in range(100)]
    assert data_wait_share(many) == 0.0


def test_history_survives_json(tmp_path: Path) -> None:
    evaluations = [EvaluationRecord(0, 2.0, 1.05, 1.1, 0.3), EvaluationRecord(1, 1.0, 1.6, 1.5, 0.1)]
    history = History([_step(0, 0.1)], evaluations, Trajectory([[[3, 1], []], [[2], [5]]]))
    write_history(tmp_path / "history.json", history.as_dict())
    text = (tmp_path / "history.json").read_text()
    assert "[[3,1],[]],\n[[2],[5]]" in text  # a step a line, for people and for size
    again = History.from_dict(json.loads(text))
    assert again == history
    write_history(tmp_path / "empty.json", History().as_dict())
    assert History.from_dict(json.loads((tmp_path / "empty.json").read_text())) == History()
    figures = again.figures()
    assert (figures["eal_start"], figures["eal_held_out"], figures["steps"], figures["tokens"]) == (1.05, 1.6, 1, 100)
