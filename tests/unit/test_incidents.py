"""Incidents: bounded, and counted all the same."""

from draftline.hidden_states.incidents import KEPT, Incidents


def test_the_newest_are_kept_and_all_are_counted() -> None:
    incidents = Incidents()
    for number in range(KEPT + 7):
        incidents.add("state", str(number))
    assert incidents.total == KEPT + 7
    assert incidents.newest() == [("state", str(number)) for number in range(7, KEPT + 7)]
