"""Where drafts end: the arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.vllm_plugin.confidence import cut_drafts, kept_tokens, read_cut, threshold

confidences = st.lists(st.floats(0.0, 1.0), max_size=16)


@pytest.mark.parametrize("options", [None, {}, {"other": 1}, {"draftline": {}}, {"draftline": {"confidence_cut": 0}}])
def test_no_cut_is_asked_for(options: dict | None) -> None:
    assert read_cut(options) == 0.0


def test_cut_is_read() -> None:
    assert read_cut({"draftline": {"confidence_cut": 0.25}}) == 0.25
    assert read_cut({"draftline": {"confidence_cut": "auto"}}) == "auto"


@pytest.mark.parametrize("value", [-0.1, 1.5, "high", True, None, float("nan")])
def test_bad_cut_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match=r"confidence_cut: found .*; allowed: 0 to 1, or \"auto\""):
        read_cut({"draftline": {"confidence_cut": value}})


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown option 'cut'; allowed: confidence_cut"):
        read_cut({"draftline": {"cut": 0.5}})


@given(confidences, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_higher_cut_never_keeps_more(row: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= kept_tokens(row, high) <= kept_tokens(row, low) <= len(row)


@given(confidences)
def test_cut_zero_keeps_everything(row: list[float]) -> None:
    assert kept_tokens(row, 0.0) == len(row)


def test_drafts_end_where_the_product_falls_below_the_cut() -> None:
    drafts, rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0.9, 0.9, 0.9], [0.9, 0.5, 0.99], [0.1, 1.0, 1.0]]
    assert cut_drafts(drafts, rows, 0.5) == [[1, 2, 3], [4], []]


def test_threshold_is_the_rate_times_the_price_of_a_token() -> None:
    # Acceptance 1/2: 1 token in 10 ms, 1.5 in 12, 1.75 in 14: the best rate is 125 a second, a token costs 2 ms.
    assert threshold([0.010, 0.012, 0.014], 0.5) == pytest.approx(125 * 0.002)


def test_threshold_bears_disturbed_measurements() -> None:
    calm = threshold([0.020 + 0.001 * k for k in range(9)])
    assert threshold([0.120, *(0.020 + 0.001 * k for k in range(1, 9))]) == pytest.approx(calm, rel=0.2)


@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=16), st.floats(0.0, 1.0))
def test_threshold_is_a_probability(costs_s: list[float], acceptance: float) -> None:
    assert 0.0 <= threshold(costs_s, acceptance) <= 1.0


def test_verifying_for_nothing_cuts_nothing() -> None:
    assert threshold([0.02, 0.02, 0.02]) == 0.0


@given(st.integers(1, 8), st.floats(0.05, 0.95), st.floats(1e-4, 5e-3))
def test_threshold_ends_a_constant_draft_where_its_rate_is_best(most: int, acceptance: float, price_s: float) -> None:
    costs_s = [0.02 + price_s * k for k in range(most + 1)]
    kept = kept_tokens([acceptance] * most, threshold(costs_s, acceptance))

    def rate(length: int) -> float:
        return sum(acceptance**k for k in range(length + 1)) / costs_s[length]

    assert rate(kept) == pytest.approx(max(rate(length) for length in range(most + 1)))


def test_one_cost_is_not_a_curve() -> None:
    with pytest.raises(ValueError, match="at least 2 step costs"):
        threshold([0.02])
