import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import InputError
from draftline.training.vocabulary import choose_vocabulary, covered_share


@given(st.data())
def test_the_most_frequent_tokens_and_the_special_ones_are_kept(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 60))
    tokens = st.integers(0, vocab_size - 1)
    counts = data.draw(st.dictionaries(tokens, st.integers(1, 9)))
    always = data.draw(st.sets(tokens))
    size = data.draw(st.integers(max(1, len(always)), vocab_size))
    kept = choose_vocabulary(counts, vocab_size, size, always)
    assert kept == sorted(set(kept)) and len(kept) == size
    assert always <= set(kept)
    left_out = [count for token, count in counts.items() if token not in kept]
    chosen = [counts.get(token, 0) for token in kept if token not in always]
    assert max(left_out, default=0) <= min(chosen, default=9)


def test_ties_and_filling_up_go_by_id() -> None:
    assert choose_vocabulary({7: 2, 5: 2, 3: 9}, 10, 2) == [3, 5]
    assert choose_vocabulary({7: 1}, 10, 4, always=[9]) == [0, 1, 7, 9]


@pytest.mark.parametrize("size", [0, 11])
def test_a_size_that_the_target_does_not_have_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=rf"draft.vocab_size is {size}, but the target has 10 tokens"):
        choose_vocabulary({}, 10, size)


def test_special_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="3 special tokens must be in it"):
        choose_vocabulary({}, 10, 2, always=[1, 2, 3])


def test_covered_share() -> None:
    assert covered_share({1: 3, 2: 1}, [1]) == 0.75
    assert covered_share({}, [1]) == 1.0
