"""The batch plan: every sample once per epoch, no row too long, the same plan every time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import InputError
from draftline.samples.plan import HELD_OUT_EPOCH, BatchPlan, plan_rows

ROW_TOKENS = 64
lengths = st.dictionaries(st.integers(0, 500), st.integers(1, ROW_TOKENS), max_size=80)


@given(lengths=lengths, ranks=st.integers(1, 4), epochs=st.integers(0, 3), seed=st.integers(0, 9), data=st.data())
def test_every_sample_comes_once_per_epoch(
    lengths: dict[int, int], ranks: int, epochs: int, seed: int, data: st.DataObject
) -> None:
    held_out = data.draw(st.lists(st.sampled_from(sorted(lengths)), unique=True)) if lengths else []
    plan = plan_rows(lengths, held_out, row_tokens=ROW_TOKENS, ranks=ranks, epochs=epochs, seed=seed)

    by_epoch: dict[int, Counter[int]] = {}
    for row in plan.rows:
        by_epoch.setdefault(row.epoch, Counter()).update(row.samples)
    assert by_epoch.get(HELD_OUT_EPOCH, Counter()) == Counter(held_out)
    for epoch in range(epochs):
        assert by_epoch.get(epoch, Counter()) == Counter(set(lengths) - set(held_out))
    assert set(by_epoch) <= {HELD_OUT_EPOCH, *range(epochs)}

    assert all(sum(lengths[sample] for sample in row.samples) <= ROW_TOKENS for row in plan.rows)
    assert [(row.position, row.rank) for row in plan.rows] == [
        (position, rank) for position in range(plan.positions) for rank in range(ranks)
    ]
    assert [row.epoch for row in plan.rows] == sorted(row.epoch for row in plan.rows)
    assert all((row.epoch == HELD_OUT_EPOCH) == (row.position < plan.held_out_positions) for row in plan.rows)


@given(lengths=lengths, seed=st.integers(0, 9))
def test_a_plan_does_not_depend_on_the_order_of_its_input(lengths: dict[int, int], seed: int) -> None:
    def plan(given: dict[int, int]) -> BatchPlan:
        return plan_rows(given, (), row_tokens=ROW_TOKENS, ranks=2, epochs=2, seed=seed)

    assert plan(lengths) == plan(dict(reversed(lengths.items())))


def test_seed_wave_and_epoch_change_the_order() -> None:
    lengths = dict.fromkeys(range(100), 16)
    base, other_seed, other_wave = (
        plan_rows(lengths, (), row_tokens=ROW_TOKENS, ranks=1, epochs=2, seed=seed, wave=wave)
        for seed, wave in ((0, 0), (1, 0), (0, 1))
    )
    orders = [[row.samples for row in plan.rows if row.epoch == 0] for plan in (base, other_seed, other_wave)]
    orders.append([row.samples for row in base.rows if row.epoch == 1])
    assert len({tuple(order) for order in orders}) == 4


def test_rows_are_filled_well() -> None:
    lengths = {number: 5 + number * 7 % 41 for number in range(400)}
    plan = plan_rows(lengths, (), row_tokens=ROW_TOKENS, ranks=1, epochs=1, seed=0)
    assert sum(lengths.values()) / (len(plan.rows) * ROW_TOKENS) > 0.9


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(InputError, match=r"sample 3 has 65 tokens.*at most 64"):
        plan_rows({1: 10, 3: 65}, (), row_tokens=ROW_TOKENS, ranks=1, epochs=1, seed=0)


def test_a_row_that_is_not_there_is_refused() -> None:
    plan = plan_rows({1: 10}, (), row_tokens=ROW_TOKENS, ranks=2, epochs=1, seed=0)
    assert plan.row(0, 1).samples == ()
    with pytest.raises(ValueError, match="position 1"):
        plan.row(1, 0)
