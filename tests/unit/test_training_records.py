import pytest

from draftline.training.records import EvaluationRecord, History, StepRecord, data_wait_share


def _step(step: int, wait_s: float) -> StepRecord:
    return StepRecord(step, 1.0, 1.1, 1.2, 1e-3, 100, 50, wait_s, 0.2, 0.5, 0.1)


def test_the_wait_share_leaves_out_the_warm_up() -> None:
    slow_start = [_step(step, 10.0 if step < 5 else 0.2) for step in range(20)]
    assert data_wait_share(slow_start) == pytest.approx(0.2)
    assert data_wait_share(slow_start[:5]) == 0.0
    many = [_step(step, 10.0 if step < 10 else 0.0) for step in range(100)]
    assert data_wait_share(many) == 0.0


def test_history_survives_json() -> None:
    evaluations = [EvaluationRecord(0, 2.0, 1.05, 1.1, 0.3), EvaluationRecord(1, 1.0, 1.6, 1.5, 0.1)]
    history = History([_step(0, 0.1)], evaluations)
    again = History.from_dict(history.as_dict())
    assert again == history
    figures = again.figures()
    assert (figures["eal_start"], figures["eal_held_out"], figures["steps"], figures["tokens"]) == (1.05, 1.6, 1, 100)
