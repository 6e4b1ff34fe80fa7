"""What follows a failure: budgets by cause, under every order of failures."""

from hypothesis import given
from hypothesis import strategies as st

from draftline.recipe.schema import Failures
from draftline.runs.policy import (
    LONGEST_PAUSE_S,
    LONGEST_SLOW_PAUSE_S,
    Action,
    Cause,
    FailurePolicy,
    Guarantee,
    guarantee,
)

CAUSES = st.sampled_from([cause for cause in Cause if cause.recipe_key])


@given(st.lists(st.tuples(CAUSES, st.floats(0, 500)), max_size=40), st.integers(0, 4))
def test_a_cause_is_recovered_from_as_often_as_its_budget_says(events: list[tuple[Cause, float]], budget: int) -> None:
    failures = Failures(
        **dict.fromkeys(("replicas", "masters", "workers", "feeders", "engines", "storage"), budget),
        forget_after_s=1000.0,
    )
    policy = FailurePolicy(failures)
    now, seen = 0.0, dict[str | None, list[float]]()
    for cause, later in events:
        now += later
        recent = seen.setdefault(cause.recipe_key, [])
        recent.append(now)
        count = sum(now - time < 1000.0 for time in recent)
        decision = policy.decide(cause, now)
        assert (decision.action is Action.RECOVER) == (count <= budget)
        assert f"failures.{cause.recipe_key}" in decision.reason
        slow = cause in (Cause.STORAGE, Cause.DISK)
        assert 0.0 <= decision.pause_s <= (LONGEST_SLOW_PAUSE_S if slow else LONGEST_PAUSE_S)


def test_pauses_double_and_old_failures_are_forgotten() -> None:
    policy = FailurePolicy(Failures(replicas=3, pause_s=2.0, forget_after_s=100.0))
    assert [policy.decide(Cause.REPLICA, time).pause_s for time in (0.0, 1.0, 2.0)] == [2.0, 4.0, LONGEST_PAUSE_S]
    assert policy.decide(Cause.REPLICA, 3.0).action is Action.FAIL
    assert policy.decide(Cause.MASTER, 3.0).action is Action.RECOVER
    assert policy.decide(Cause.REPLICA, 200.0).pause_s == 2.0


def test_pauses_stay_bounded_after_thousands_of_failures() -> None:
    policy = FailurePolicy(Failures(replicas=5000, pause_s=2.0, forget_after_s=1e6))
    assert [policy.decide(Cause.REPLICA, 0.0).pause_s for _ in range(3000)][-1] == LONGEST_PAUSE_S


def test_lost_states_need_no_budget() -> None:
    policy = FailurePolicy(Failures())
    assert {policy.decide(Cause.STATE, 0.0).action for _ in range(100)} == {Action.RECOVER}


def test_a_skipped_sample_voids_the_stronger_guarantee() -> None:
    assert guarantee(True, 0) is Guarantee.BITWISE
    assert guarantee(True, 1) is Guarantee.SAME_STATES
    assert guarantee(False, 0) is Guarantee.SAME_STATES
