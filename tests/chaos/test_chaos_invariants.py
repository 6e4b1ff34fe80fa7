"""The checks of the chaos suite see what they are there to see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.bench import RECIPE
from chaos.harness import Experiment, Reference
from chaos.invariants import compare, record_problems
from chaos.plan import Damage, Fault, Scenario, Shape, Victim, Way, scenario, undisturbed
from chaos.recovery import Strike, allowed_standstill_s, finished_stages, longest_pause, repetition_problems
from chaos.victims import Seen, by_role
from chaos.watch import Life, Watch
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


def kill(*victims: Victim, damage: Damage | None = None) -> Scenario:
    way = Way.DAMAGE if damage else Way.KILL
    return Scenario(0, Shape(), way, "train", tuple(Fault(victim, share=0.5) for victim in victims), damage)


def test_the_undisturbed_run_s_pauses_are_those_from_the_fault_on() -> None:
    marks = [0.0, 20.0, 21.0, 22.0, 26.0]
    assert longest_pause(marks, 5.0) == 20.0  # the fault falls into it
    assert longest_pause(marks, 20.0) == longest_pause(marks, 21.5) == 4.0
    assert longest_pause(marks, 26.0) == 0.0
    lives = {("train", Victim.MASTER): Life(2.0, 26.0)}
    reference = Reference({}, lives, (), {"train": marks})
    assert reference.pause_s("train", Fault(Victim.MASTER, share=0.5)) == 20.0
    assert reference.pause_s("train", Fault(Victim.MASTER, share=0.8)) == 4.0


@pytest.mark.parametrize("victim", [Victim.REPLICA, Victim.REPLICA_ENGINE, Victim.MASTER, Victim.MASTER_PROCESS])
def test_a_standstill_longer_than_an_engine_s_start_is_seen(victim: Victim, tmp_path: Path) -> None:
    assert allowed_standstill_s(kill(victim), engine_start_s=20.0, pause_s=4.0) == 34.0
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(target=tmp_path, replicas=1, workers=1, epochs=1))
    reference = Reference({}, {("train", victim): Life(0.0, 10.0)}, (), {"train": [0.0, 6.0, 10.0]})
    unseen = Experiment(tmp_path, kill(victim), reference, 1.0)
    unseen._check_standstill(0.0)
    assert unseen._outcome.problems == ["no target replica was seen to come up"]
    for standstill_s, problems in ((34.0, []), (36.1, ["no progress for 36.1 s, allowed 36.0 s"])):
        experiment = Experiment(tmp_path, kill(victim), reference, 1.0)
        experiment._outcome.engine_start_s = 20.0
        experiment._check_standstill(standstill_s)
        assert experiment._outcome.problems == problems
        assert "(allowed 36 s)" in replace(experiment._outcome, standstill_s=standstill_s).line()


def test_other_recoveries_have_no_such_limit() -> None:
    for plan in (kill(Victim.WORKER), kill(Victim.REPLICA, Victim.MASTER), kill(Victim.DRIVER), undisturbed(Shape())):
        assert allowed_standstill_s(plan, engine_start_s=20.0, pause_s=4.0) is None


def test_a_standstill_is_from_the_signal_to_the_next_work() -> None:
    watch = Watch(Path(), marks=[1.0, 2.0, 9.0, 10.0], last_seen={"train": 12.0}, _began={"train": 0.5})
    assert watch.standstill(since=4.0, until=12.0) == 5.0
    assert watch.standstill(since=9.5, until=12.0) == 2.0
    assert watch.marks_within("train") == [0.0, 0.5, 1.5, 8.5, 9.5, 11.5]


def test_only_work_that_is_new_is_progress(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    assert watch._progressed("[prepare] sample 3/20  tokens/s 7\n")
    assert not watch._progressed("[prepare] sample 3/20  tokens/s 6\n[prepare] sample 0/20\n")
    assert not watch._progressed("[train] step 7/20  loss 1\n[train] captured sample 4\n")  # said late
    manifest = tmp_path / "checkpoints" / "step-00000020" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    assert watch._progressed("")
    assert not watch._progressed("")


def test_an_engine_s_start_is_from_its_process_to_its_word() -> None:
    watch = Watch(Path())
    for now, pids, up in ((1.0, [4], False), (3.0, [5], False), (9.0, [5], True), (20.0, [5, 6], False)):
        watch._note_engines(pids, up, now)
    assert watch.engine_starts == [6.0]  # of 5: 4 was lost before it was up
    watch._note_engines([5, 6], True, 27.0)
    watch._note_engines([5, 6], True, 30.0)
    assert watch.engine_starts == [6.0, 7.0]


def ended(resumed: int | None, **attempts: int) -> dict[str, object]:
    stages = {name: {"state": "done", "attempts": [{}] * tried} for name, tried in attempts.items()}
    figures = {"train.steps": 100} | ({} if resumed is None else {"train.resumed_from_step": resumed})
    return {"stages": stages, "figures": figures}


def test_a_finished_stage_that_is_tried_again_is_seen() -> None:
    before = {
        "stages": {"prepare": {"state": "done", "attempts": [{}]}, "train": {"state": "running", "attempts": [{}]}}
    }
    strike = Strike(1.0, Victim.DRIVER, 0, finished_stages(before))
    assert strike.finished == {"prepare": 1} and finished_stages({}) == {}
    assert repetition_problems(ended(None, prepare=1, train=2), kill(Victim.DRIVER), [strike], 20) == []
    again = ended(None, prepare=2, train=2)
    problems = repetition_problems(again, kill(Victim.DRIVER), [strike], 20)
    assert problems == ["prepare was done after 1 attempt(s), and yet has 2"]
    assert repetition_problems(again, kill(Victim.DRIVER, damage=Damage.CHECKPOINT), [strike], 20) == problems
    assert repetition_problems(again, kill(Victim.DRIVER, damage=Damage.SAMPLES), [strike], 20) == []
    twice = [strike, Strike(9.0, Victim.DRIVER, 0, {"prepare": 2})]
    assert repetition_problems(again, kill(Victim.DRIVER, Victim.DRIVER), twice, 20) == problems


@pytest.mark.parametrize("victim", [Victim.DRIVER, Victim.COMMAND, Victim.WORKER, Victim.FEEDER, Victim.BOARD])
def test_more_than_a_checkpoint_interval_of_training_again_is_seen(victim: Victim) -> None:
    def problems(resumed: int | None, checkpointed: int = 60, damage: Damage | None = None) -> list[str]:
        strike = Strike(1.0, victim, checkpointed, {})
        return repetition_problems(ended(resumed, train=2), kill(victim, damage=damage), [strike], 20)

    assert problems(60) == problems(73) == problems(None, checkpointed=0) == []
    for too_early in (40, None):
        (problem,) = problems(too_early)
        assert problem.endswith("although step 60 was checkpointed and whole")
    assert problems(40, damage=Damage.CHECKPOINT) == []
    assert problems(39, damage=Damage.CHECKPOINT)
    assert problems(40, damage=Damage.SAMPLES)
    assert problems(None, checkpointed=80) == []  # training had ended
    assert problems(60, checkpointed=80)


def test_training_does_not_begin_again_after_a_replica() -> None:
    strike = Strike(1.0, Victim.REPLICA, 60, {})
    assert repetition_problems(ended(None, train=1), kill(Victim.REPLICA), [strike], 20) == []


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
