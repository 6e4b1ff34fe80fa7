import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.recipe.schema import Optimizer
from draftline.training.schedule import lr_factor

optimizers = st.builds(
    Optimizer,
    warmup_share=st.floats(0.0, 1.0),
    decay=st.sampled_from(["linear", "cosine", "constant"]),
    min_lr_share=st.floats(0.0, 1.0),
)


@given(optimizers, st.integers(1, 200))
def test_the_rate_rises_to_the_peak_and_never_rises_again(optimizer: Optimizer, steps: int) -> None:
    course = [lr_factor(step, steps, optimizer) for step in range(steps)]
    peak = max(0, min(steps, math.ceil(optimizer.warmup_share * steps)) - 1)
    assert course[peak] == pytest.approx(1.0)
    assert all(0.0 < factor <= 1.0 + 1e-12 for factor in course[: peak + 1])
    assert course[: peak + 1] == sorted(course[: peak + 1])
    assert all(later <= earlier + 1e-12 for earlier, later in zip(course[peak:], course[peak + 1 :], strict=False))


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_last_step_has_the_least_rate(decay: str) -> None:
    optimizer = Optimizer(warmup_share=0.1, decay=decay, min_lr_share=0.05)  # type: ignore[arg-type]
    assert lr_factor(99, 100, optimizer) == pytest.approx(0.05)
    assert lr_factor(9, 100, optimizer) == 1.0


def test_half_way_down() -> None:
    optimizer = Optimizer(warmup_share=0.0, min_lr_share=0.0)
    assert lr_factor(50, 101, optimizer) == pytest.approx(0.5)
    assert lr_factor(25, 101, Optimizer(warmup_share=0.0, decay="cosine", min_lr_share=0.0)) == pytest.approx(0.8535534)


def test_a_step_outside_the_training_is_refused() -> None:
    with pytest.raises(ValueError, match="step 10 is outside 0 to 9"):
        lr_factor(10, 10, Optimizer())
