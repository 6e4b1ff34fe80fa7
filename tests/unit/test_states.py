"""The state machine of a run, under every order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.runs.states import STAGES, IllegalTransition, RunState, StageState, advance_run, advance_stage

FRESH = dict.fromkeys(STAGES, StageState.PENDING)


@given(st.lists(st.tuples(st.sampled_from(STAGES), st.sampled_from(list(StageState))), max_size=60))
def test_no_order_of_events_breaks_the_order_of_stages(events: list[tuple[str, StageState]]) -> None:
    stages = dict(FRESH)
    for name, to in events:
        before = dict(stages)
        try:
            stages = advance_stage(stages, name, to)
        except IllegalTransition:
            assert stages == before
            continue
        states = list(stages.values())
        begun = [state for state in states if state is not StageState.PENDING]
        assert states[: len(begun)] == begun, "what has begun is a head of the list"
        assert all(state is StageState.DONE for state in begun[:-1]), "only the last one may be unfinished"
        assert states.count(StageState.RUNNING) <= 1


def test_a_whole_run() -> None:
    stages = dict(FRESH)
    run = advance_run(RunState.PENDING, RunState.RUNNING, stages)
    for name in STAGES:
        with pytest.raises(IllegalTransition, match="only when every stage"):
            advance_run(run, RunState.DONE, stages)
        stages = advance_stage(stages, name, StageState.RUNNING)
        with pytest.raises(IllegalTransition):
            advance_run(run, RunState.FAILED, stages)
        stages = advance_stage(stages, name, StageState.DONE)
    assert advance_run(run, RunState.DONE, stages) is RunState.DONE


def test_running_a_stage_again_takes_back_what_came_after() -> None:
    stages = dict.fromkeys(STAGES, StageState.DONE)
    stages = advance_stage(stages, "train", StageState.RUNNING)
    assert list(stages.values()) == [
        StageState.DONE,
        StageState.RUNNING,
        StageState.PENDING,
        StageState.PENDING,
        StageState.PENDING,
    ]


def test_a_stage_waits_for_those_before_it() -> None:
    with pytest.raises(IllegalTransition, match="before prepare, train"):
        advance_stage(FRESH, "export", StageState.RUNNING)


def test_terminal_states() -> None:
    assert [state.value for state in StageState if state.terminal] == ["done", "failed", "stopped"]
    assert [state.value for state in RunState if state.terminal] == ["done", "failed", "stopped"]
