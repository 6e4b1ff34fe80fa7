"""The plan of the chaos suite: what any 20 seeds cover, and that a seed always means the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.plan import CYCLE, Victim, Way, parse_seeds, scenario
from draftline.runs.states import STAGES

SEEDS = st.integers(0, 1_000_000)


@given(SEEDS)
def test_a_seed_always_means_the_same_and_the_plan_can_be_carried_out(seed: int) -> None:
    plan = scenario(seed)
    assert plan == scenario(seed)
    stages = STAGES[: STAGES.index(plan.shape.until) + 1] if plan.shape.until else STAGES
    assert plan.stage in stages
    assert plan.faults
    assert 0.0 < plan.faults[0].share < 1.0
    assert all(0.5 <= fault.after_s <= 8.0 for fault in plan.faults[1:])
    assert (plan.damage is not None) == (plan.way is Way.DAMAGE)
    assert (plan.hold_s > 0) == (plan.way is Way.FULL_DISK)
    if plan.way is not Way.KILL:
        assert plan.ends_run  # what is changed between two submissions needs two of them


@given(SEEDS)
def test_any_twenty_seeds_cover_all_victims_and_ways(first: int) -> None:
    plans = [scenario(seed) for seed in range(first, first + CYCLE)]
    hit = {fault.victim for plan in plans for fault in plan.faults if plan.way is Way.KILL}
    either = [{Victim.EVALUATION_ENGINE, Victim.EVALUATION_CORE}]
    assert all(hit & choice for choice in either)
    assert hit >= set(Victim) - {Victim.COMMAND} - either[0]
    assert [plan.way for plan in plans].count(Way.STOP) == 2
    assert [plan.way for plan in plans].count(Way.DAMAGE) == 1
    assert [plan.way for plan in plans].count(Way.FULL_DISK) == 1
    assert any(len(plan.faults) == 2 for plan in plans)
    assert {plan.shape.replicas for plan in plans} == {plan.shape.workers for plan in plans} == {1, 2}
    assert {plan.stage for plan in plans} == set(STAGES)


def test_moments_differ_from_cycle_to_cycle() -> None:
    assert len({scenario(seed).faults[0].share for seed in range(0, 20 * CYCLE, CYCLE)}) == 20


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds("0-3,7") == [0, 1, 2, 3, 7]
    assert parse_seeds("5") == [5]
    for bad in ("", "a", "3-", "-1", "1-b", "4-2"):
        with pytest.raises(ValueError, match="allowed"):
            parse_seeds(bad)
