from hypothesis import given
from hypothesis import strategies as st

from draftline.training.walk import walk

PROMPT = [90, 91]


def test_a_block_starts_where_the_last_one_ended() -> None:
    answer = [1, 2, 3, 4, 5, 6]
    choices = [[2, 3, 0], [0, 0, 0], [0, 0, 0], [5, 6, 7], [6, 0, 0], [0, 0, 0]]
    # anchor 1 drafts 2 3 (2 accepted), the target says 4; anchor 4 drafts 5 6 (2 accepted) and the answer is over
    assert walk(choices, PROMPT + answer, 2) == (4, 2)


def test_nothing_right_is_one_block_for_each_token_after_the_first() -> None:
    assert walk([[0]] * 5, [*PROMPT, 1, 2, 3, 4, 5], 2) == (0, 4)


def test_no_block_starts_at_the_last_token() -> None:
    assert walk([[7, 8]], [*PROMPT, 1], 2) == (0, 0)
    assert walk([], PROMPT, 2) == (0, 0)


def test_the_engine_counts_what_it_accepts_beyond_the_longest_answer() -> None:
    tokens = [*PROMPT, 1, 2, 3, 4, 5]
    right = [[2, 3, 4], [3, 4, 5], [4, 5], [5], []]
    assert walk(right, tokens, 2, max_tokens=3) == (3, 1)
    assert walk([[0], [0], [4], [0], [0]], tokens, 2, max_tokens=3) == (0, 2)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_accepted_and_blocks_make_up_the_answer(answer: list[int], draft_tokens: int, data: st.DataObject) -> None:
    choices = [data.draw(st.lists(st.integers(0, 2), min_size=draft_tokens, max_size=draft_tokens)) for _ in answer]
    accepted, blocks = walk(choices, PROMPT + answer, 2)
    # The first token costs no block; each block emits its accepted tokens and one of the target's own, which the
    # answer's end may cut.
    assert len(answer) - 1 <= accepted + blocks <= len(answer)
    assert accepted <= blocks * draft_tokens
