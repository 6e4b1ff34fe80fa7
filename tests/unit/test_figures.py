"""Figures and the served check, from answers written by hand."""

from __future__ import annotations

import pytest

from draftline.evaluation.answers import Answer, Measurement
from draftline.evaluation.figures import (
    acceptance_length,
    acceptance_per_position,
    evaluation_figures,
    kept,
    passes,
    tokens_per_pass,
)
from draftline.evaluation.served_check import ServedCheckFailed, check_served

PLAIN = Answer((1, 2, 3, 4, 5, 6), seconds=3.0)
SERVED = Answer((1, 2, 3, 4, 5, 6), seconds=2.0, drafted=(1, 2), accepted=(1, 2))
UNCUT = Answer((1, 2, 3, 4, 5, 6), seconds=2.5, drafted=(4, 4), accepted=(1, 2))


def test_acceptance_counts_the_bonus_token() -> None:
    assert acceptance_length([UNCUT, UNCUT]) == pytest.approx(2.5)
    assert acceptance_length([PLAIN]) == 1.0
    assert acceptance_per_position([UNCUT]) == [1.0, 0.5, 0.0, 0.0]
    assert sum(acceptance_per_position([UNCUT])) + 1 == pytest.approx(acceptance_length([UNCUT]))


def test_accepted_tokens_beyond_the_end_do_not_count() -> None:
    # Of 6 tokens one is the prompt's, two are of the first pass, and three of the second, which had accepted four.
    answer = Answer((1, 2, 3, 4, 5, 6), 1.0, drafted=(4, 4), accepted=(1, 4))
    assert kept(answer) == [1, 3] and kept(PLAIN) == []
    assert acceptance_length([answer]) == pytest.approx(3.0)


def test_passes_without_a_draft_count() -> None:
    # First token by the prompt, then 2 from a draft of 3, then two passes without one.
    answer = Answer((1, 2, 3, 4, 5), 1.0, drafted=(3,), accepted=(1,))
    assert passes(answer) == 3
    assert tokens_per_pass([answer]) == pytest.approx(4 / 3)
    # The last draft reached two tokens beyond the end.
    assert tokens_per_pass([Answer((1, 2, 3), 1.0, drafted=(4,), accepted=(3,))]) == pytest.approx(2.0)
    assert tokens_per_pass([PLAIN]) == 1.0 and tokens_per_pass([Answer((1,), 1.0)]) == 1.0


def test_figures_of_two_domains() -> None:
    poor = Answer((1, 2, 3, 4, 5, 6), 3.0, drafted=(4,) * 5, accepted=(0,) * 5)
    measurements = [Measurement(0, "maths", PLAIN, SERVED, UNCUT), Measurement(1, "code", PLAIN, SERVED, poor)]
    figures = evaluation_figures(measurements, estimate=1.4)
    assert figures["evaluate.acceptance.maths"] == pytest.approx(2.5)
    assert figures["evaluate.acceptance.code"] == pytest.approx(1.0)
    assert figures["evaluate.acceptance_length"] == pytest.approx(1 + 3 / 7)
    assert figures["evaluate.acceptance_length_cut"] == pytest.approx(2.5)
    assert figures["evaluate.estimate_gap"] == pytest.approx(abs(1 + 3 / 7 - 1.4) / 1.4)
    assert figures["evaluate.tokens_per_s_plain"] == pytest.approx(2.0)
    assert figures["evaluate.tokens_per_s_draft"] == pytest.approx(3.0)
    assert figures["evaluate.speedup_batch1"] == pytest.approx(1.5)
    assert figures["evaluate.drafted_per_pass_cut"] == pytest.approx(1.5)
    assert figures["evaluate.acceptance_per_position.1"] == pytest.approx(2 / 7)
    assert figures["evaluate.identical_share"] == figures["evaluate.identical_share_batched"] == 1.0
    assert all(isinstance(value, float) for value in figures.values())


def test_served_check_passes_and_names_the_gap() -> None:
    measurements = [Measurement(0, "maths", PLAIN, SERVED, UNCUT)]
    check_served(evaluation_figures(measurements, 2.51), measurements, tolerance=0.02)
    with pytest.raises(ServedCheckFailed, match=r"2\.500.*2\.800.*10\.7%.*2\.0%"):
        check_served(evaluation_figures(measurements, 2.8), measurements, tolerance=0.02)


@pytest.mark.parametrize(
    ("tokens", "message"), [((1, 2, 9, 4, 5, 6), "token 2 is 3 .* and 9"), ((1, 2, 3, 4, 5), "token 5 is 6 .* nothing")]
)
def test_served_check_names_the_first_difference(tokens: tuple[int, ...], message: str) -> None:
    other = Answer(tokens, 2.0, (4, 4), (1, 2))
    measurements = [Measurement(0, "maths", PLAIN, SERVED, UNCUT), Measurement(7, "code", PLAIN, other, UNCUT)]
    with pytest.raises(ServedCheckFailed, match=rf"50\.0%.*prompt 7 \(code\): {message}"):
        check_served(evaluation_figures(measurements, 2.5), measurements, tolerance=0.02)


def test_answers_under_load_may_differ_but_are_counted() -> None:
    loaded = Answer((1, 2, 3, 4, 5, 7), 2.5, (4, 4), (1, 2))
    measurements = [Measurement(0, "maths", PLAIN, SERVED, loaded)]
    figures = evaluation_figures(measurements, 2.5)
    assert figures["evaluate.identical_share_batched"] == 0.0
    check_served(figures, measurements, tolerance=0.02)
