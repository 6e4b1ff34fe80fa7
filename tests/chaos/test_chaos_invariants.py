"""The checks of the chaos suite see what they are there to see."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chaos.harness import Reference
from chaos.invariants import compare, record_problems
from chaos.plan import Fault, Shape, Victim, scenario, undisturbed
from chaos.victims import Seen, by_role
from chaos.watch import Life
from draftline.samples.plan import BatchPlan, plan_rows

PLANS = st.builds(
    lambda lengths, ranks, epochs, seed: plan_rows(
        dict(enumerate(lengths)), [0], row_tokens=64, ranks=ranks, epochs=epochs, seed=seed
    ),
    st.lists(st.integers(1, 64), min_size=3, max_size=30),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 9),
)


def as_planned(plan: BatchPlan) -> list[list[list[int]]]:
    return [
        [list(plan.row(plan.held_out_positions + step, rank).samples) for rank in range(plan.ranks)]
        for step in range(plan.steps)
    ]


@given(PLANS)
def test_a_training_that_kept_to_its_plan_has_no_problems(plan: BatchPlan) -> None:
    found = compare(as_planned(plan), plan)
    assert (found.lost, found.repeated, found.problems) == (0, 0, ())


@given(PLANS, st.data())
def test_a_lost_and_a_repeated_sample_are_seen(plan: BatchPlan, data: st.DataObject) -> None:
    consumed = as_planned(plan)
    rows = [(step, rank) for step, row in enumerate(consumed) for rank, samples in enumerate(row) if samples]
    step, rank = data.draw(st.sampled_from(rows))
    sample = consumed[step][rank].pop()
    found = compare(consumed, plan)
    assert (found.lost, found.repeated) == (1, 0)
    assert found.problems
    consumed[step][rank] += [sample, sample]
    found = compare(consumed, plan)
    assert (found.lost, found.repeated) == (0, 1)
    assert found.problems


@given(PLANS)
def test_a_missing_and_a_repeated_step_are_seen(plan: BatchPlan) -> None:
    consumed = as_planned(plan)
    assert compare(consumed[:-1], plan).problems
    again = compare([*consumed, consumed[-1]], plan)
    assert again.problems
    assert again.repeated == sum(map(len, consumed[-1]))


def test_a_moment_among_the_steps_is_told_by_the_step() -> None:
    lives = {("train", Victim.FEEDER): Life(10.0, 50.0), ("export", Victim.EXPORT_TASK): Life(1.0, 5.0)}
    reference = Reference({}, lives, steps=((30.0, 20), (35.0, 40), (40.0, 60)))
    assert reference.moment("train", Fault(Victim.FEEDER, share=0.25)) == (10.0, 0)  # before the first checkpoint
    assert reference.moment("train", Fault(Victim.FEEDER, share=0.7)) == (0.0, 40)
    assert reference.moment("train", Fault(Victim.FEEDER, share=0.9)) == (0.0, 60)
    assert reference.moment("export", Fault(Victim.EXPORT_TASK, share=0.5)) == (2.0, 0)


def test_the_record_must_tell_of_what_was_done() -> None:
    kill = next(plan for plan in map(scenario, range(20)) if plan.faults[0].victim is Victim.FEEDER)
    record = {"state": "stopped", "attempts": [], "events": []}
    assert record_problems(record, kill) == ["no event tells of the feeder; events: none"]
    told = record | {"events": [{"cause": "feeder", "what": "gone"}]}
    assert record_problems(told, kill) == []
    assert record_problems(told, undisturbed(Shape())) == ["nothing was done to the run, and yet: ['gone']"]
    assert record_problems(told | {"state": "failed"}, kill) == ["the record's state is failed, not stopped"]


def test_processes_are_told_apart_by_their_titles() -> None:
    family = [
        Seen(1, 0, "/x/.venv/bin/python3 -m draftline.cli run recipe.yaml --no-wait"),
        Seen(2, 1, "/bin/sh -c cd /x && exec env python /x/jobs/pipeline.py /x/recipe.yaml"),
        Seen(3, 2, "/x/.venv/bin/python3 /x/jobs/pipeline.py /x/recipe.yaml --serve end"),
        Seen(4, 1, "ray::TargetReplica.capture"),
        Seen(5, 4, "VLLM::EngineCore"),
        Seen(6, 1, "ray::MeasuredEngine"),
        Seen(7, 6, "VLLM::EngineCore"),
        Seen(8, 1, "ray::IDLE"),
        Seen(9, 1, "ray::run: target replica 1:TargetReplica.__init__"),
        Seen(10, 5, "VLLM::Worker"),
    ]
    assert by_role(family) == {
        Victim.COMMAND: [1],
        Victim.DRIVER: [3],
        Victim.REPLICA: [4, 9],
        Victim.REPLICA_ENGINE: [5, 10],
        Victim.EVALUATION_ENGINE: [6],
        Victim.EVALUATION_CORE: [7],
    }
