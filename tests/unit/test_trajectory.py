from hypothesis import given
from hypothesis import strategies as st

from draftline.samples.plan import BatchPlan, plan_rows
from draftline.training.trajectory import Trajectory, consumption_problems

rows = st.lists(st.lists(st.integers(0, 10**12), max_size=4), min_size=1, max_size=3)


@given(st.integers(1, 3).flatmap(lambda ranks: st.lists(st.lists(rows, min_size=ranks, max_size=ranks), max_size=6)))
def test_a_trajectory_gives_back_what_it_was_given(nested: list) -> None:
    steps = [[row for rank in step for row in rank[:1]] for step in nested]
    trajectory = Trajectory(steps)
    assert list(trajectory) == steps
    assert len(trajectory) == len(steps)
    assert trajectory == Trajectory(list(trajectory))


def planned(samples: int, ranks: int, epochs: int, seed: int) -> BatchPlan:
    lengths = {number: 3 + number % 5 for number in range(samples)}
    return plan_rows(lengths, [0, 1], row_tokens=12, ranks=ranks, epochs=epochs, seed=seed)


def consumed_of(plan: BatchPlan, skipped: set[tuple[int, int]]) -> list[list[list[int]]]:
    return [
        [
            [n for n in row.samples if (n, row.epoch) not in skipped]
            for row in (plan.row(plan.held_out_positions + step, rank) for rank in range(plan.ranks))
        ]
        for step in range(plan.steps)
    ]


plans = st.builds(planned, st.integers(4, 30), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))


@given(plans, st.data())
def test_the_plan_s_own_trajectory_has_no_problem(plan: BatchPlan, data: st.DataObject) -> None:
    uses = sorted({(n, row.epoch) for row in plan.rows if row.epoch >= 0 for n in row.samples})
    skipped = set(data.draw(st.lists(st.sampled_from(uses), max_size=5)))
    consumed = consumed_of(plan, skipped)
    assert consumption_problems(consumed, plan, skipped) == []
    assert consumption_problems(Trajectory(consumed), plan, skipped) == []


@given(plans, st.data())
def test_every_kind_of_change_is_named(plan: BatchPlan, data: st.DataObject) -> None:
    consumed = consumed_of(plan, set())
    places = [(s, r) for s, step in enumerate(consumed) for r, samples in enumerate(step) if samples]
    step, rank = data.draw(st.sampled_from(places))
    epoch = plan.row(plan.held_out_positions + step, rank).epoch
    number = consumed[step][rank][-1]
    change = data.draw(st.sampled_from(["lost", "repeated", "foreign", "held out", "short", "long"]))
    if change == "lost":
        consumed[step][rank].pop()
        expected = [f"epoch {epoch}: 1 lost: {number}"]
    elif change == "repeated":
        consumed[step][rank].append(number)
        expected = [f"epoch {epoch}: 1 repeated: {number}"]
    elif change == "foreign":
        consumed[step][rank][-1] = 777
        expected = [f"epoch {epoch}: 1 lost: {number}", f"epoch {epoch}: 1 not to be used: 777"]
    elif change == "held out":
        consumed[step][rank].append(0)
        expected = [f"epoch {epoch}: 1 not to be used: 0"]
    elif change == "short":
        expected = [f"only {step} of {plan.steps} steps"]
        consumed = consumed[:step]
    else:
        expected = [f"1 step(s) beyond the plan's {plan.steps}"]
        consumed.append(consumed[-1])
    problems = consumption_problems(consumed, plan)
    assert problems[: len(expected)] == expected
    assert change == "short" or problems == expected


def test_a_swap_of_rows_within_an_epoch_is_named() -> None:
    plan = planned(30, 1, 1, 0)
    consumed = consumed_of(plan, set())
    consumed[0], consumed[1] = consumed[1], consumed[0]
    assert consumption_problems(consumed, plan) == ["2 row(s) differ from the plan's, the first at step 0, rank 0"]


def test_a_skipped_sample_that_was_used_after_all_is_named() -> None:
    plan = planned(10, 1, 1, 0)
    consumed = consumed_of(plan, set())
    used = consumed[0][0][0]
    assert consumption_problems(consumed, plan, {(used, 0)}) == [f"epoch 0: 1 not to be used: {used}"]
    assert consumption_problems([[[1], [2]]], plan) == ["step 0 has 2 ranks, the plan 1"]


def test_a_trajectory_stays_small() -> None:
    trajectory = Trajectory([[list(range(20)), list(range(20))] for _ in range(1000)])
    assert sum(part.itemsize * len(part) for part in (trajectory._counts, trajectory._samples)) < 9 * 40_000
