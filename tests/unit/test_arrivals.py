"""When states are late, and when their loss is the store's own fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftline.hidden_states.arrivals import ARRIVAL_S, SETTLE_S, Arrivals

TIMES = st.floats(0.0, 1000.0)


def test_states_are_late_once_writing_them_should_have_ended() -> None:
    arrivals = Arrivals()
    arrivals.answered("a", 100.0)
    arrivals.answered("b", 101.0)
    assert arrivals.late(["a", "b"], 100.0 + ARRIVAL_S) == ["a"]
    assert arrivals.late(["a", "b"], 101.0 + ARRIVAL_S) == ["a", "b"]


@given(TIMES, st.lists(st.tuples(TIMES, st.floats(0.0, 100.0)), max_size=5))
def test_what_was_written_before_the_store_was_itself_again_is_its_own_fault(
    answered: float, losses: list[tuple[float, float]]
) -> None:
    arrivals = Arrivals()
    arrivals.answered("key", answered)
    for now, longer_s in losses:
        arrivals.unsettle(now, longer_s)
    settled = max((now + SETTLE_S + longer_s for now, longer_s in losses), default=0.0)
    assert arrivals.blameless("key") == (answered < settled)
    arrivals.forget("key")
    assert arrivals.blameless("key") == bool(losses)
