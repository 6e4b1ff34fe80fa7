"""Runs that lose a part in the middle of training end in the same weights, whichever part it was.

`make chaos` does this to every part in every stage and compares with a run that lost nothing; here time is short.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.bench import Bench
from chaos.plan import Scenario, Shape, Victim, Way, scenario


def killed_in_training(victim: Victim) -> Scenario:
    """The first scenario that kills this part alone; training is its last stage."""
    plans = (scenario(seed) for seed in range(20))
    found = next(plan for plan in plans if (plan.way, plan.stage, plan.faults[0].victim) == (Way.KILL, "train", victim))
    return replace(found, shape=Shape(until="train", epochs=40))


@pytest.mark.timeout(900)
def test_a_killed_train_worker_and_a_killed_driver_end_in_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bench = Bench(tmp_path_factory.mktemp("chaos"))
    worker = bench.disturb(killed_in_training(Victim.WORKER))
    print(worker.line())
    assert worker.good, worker.line()
    driver = bench.disturb(killed_in_training(Victim.DRIVER))
    print(driver.line())
    assert driver.good, driver.line()
    assert (worker.submissions, driver.submissions) == (1, 2)
    assert worker.weights == driver.weights
