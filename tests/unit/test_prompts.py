"""Prompts from JSONL: the forms that are read, what is held out, and the one message for each bad line."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import InputError
from draftline.recipe.schema import Data
from draftline.samples.prompts import Prompt, _spread, check_prompt_lengths, read_prompts
from draftline.samples.tokenize import tokenize

USER = {"role": "user", "content": "hello"}


def write(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def read(folder: Path, seed: int = 0, **data: object) -> list[Prompt]:
    return read_prompts(folder / "recipe.yaml", Data(prompts="prompts.jsonl", **data), seed)  # type: ignore[arg-type]


def refusal(folder: Path, **data: object) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, **data)
    return str(caught.value).replace(str(folder), "DIR")


def many(domain: str, count: int) -> list[dict]:
    return [{"prompt": f"{domain} {number}", "domain": domain} for number in range(count)]


@pytest.mark.parametrize(
    ("entry", "messages"),
    [
        ({"prompt": "hello"}, (USER,)),
        ({"question": "hello", "answer": "x"}, (USER,)),
        ({"turns": ["hello", "and then?"]}, (USER,)),
        ({"messages": [USER]}, (USER,)),
        ({"messages": [USER, {"role": "assistant", "content": "hi"}]}, (USER,)),
        (
            {"prompt": [{"role": "system", "content": "be kind"}, USER]},
            ({"role": "system", "content": "be kind"}, USER),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hello"},
                    {"from": "gpt", "value": "hi"},
                    {"from": "human", "value": "bye"},
                    {"from": "gpt", "value": "bye"},
                ]
            },
            (USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}),
        ),
    ],
)
def test_every_form_becomes_messages_that_end_with_the_user(tmp_path: Path, entry: dict, messages: tuple) -> None:
    write(tmp_path, entry, {"prompt": "another"})
    first = read(tmp_path)[0]
    assert (first.messages, first.domain, first.number, first.line) == (messages, "default", 0, 1)


def test_another_field_can_hold_the_prompt(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "no", "text": "hello"}, {"text": "other"})
    assert [prompt.messages[0]["content"] for prompt in read(tmp_path, field="text")] == ["hello", "other"]


def test_blank_lines_count_but_hold_nothing(tmp_path: Path) -> None:
    write(tmp_path, "", {"prompt": "a"}, "  ", {"prompt": "b"})
    assert [(prompt.number, prompt.line) for prompt in read(tmp_path)] == [(0, 2), (1, 4)]


def test_each_domain_holds_some_out_and_keeps_some(tmp_path: Path) -> None:
    write(tmp_path, *many("small", 2), *many("large", 50))
    prompts = read(tmp_path, held_out_share=0.2)
    assert Counter((prompt.domain, prompt.held_out) for prompt in prompts) == {
        ("small", True): 1,
        ("small", False): 1,
        ("large", True): 10,
        ("large", False): 40,
    }


def test_the_choice_depends_on_seed_and_text_not_on_order(tmp_path: Path) -> None:
    def held_out(seed: int) -> set[str]:
        return {prompt.messages[0]["content"] for prompt in read(tmp_path, seed) if prompt.held_out}

    entries = [*many("a", 30), *many("b", 30)]
    write(tmp_path, *entries)
    forwards, other_seed = held_out(0), held_out(1)
    write(tmp_path, *reversed(entries))
    assert held_out(0) == forwards
    assert other_seed != forwards


def test_a_repeated_prompt_is_never_both_trained_on_and_held_out(tmp_path: Path) -> None:
    write(tmp_path, *many("a", 5), *many("a", 5), {"prompt": "a 1", "domain": "b"}, *many("b", 2))
    texts = [prompt.messages[0]["content"] for prompt in read(tmp_path)]
    assert sorted(texts) == ["a 0", "a 1", "a 2", "a 3", "a 4", "b 0", "b 1"]


def test_fewer_prompts_spread_over_the_domains(tmp_path: Path) -> None:
    write(tmp_path, *many("a", 3), *many("b", 40), *many("c", 40))
    chosen = read(tmp_path, max_prompts=21)
    assert Counter(prompt.domain for prompt in chosen) == {"a": 3, "b": 9, "c": 9}
    assert [prompt.number for prompt in chosen] == list(range(21))
    held_out = {prompt.line for prompt in chosen if prompt.held_out}
    assert held_out <= {prompt.line for prompt in read(tmp_path) if prompt.held_out}


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 50), min_size=1), st.none() | st.integers(1, 300))
def test_a_spread_uses_all_it_may_and_is_even(sizes: dict[str, int], most: int | None) -> None:
    quotas = _spread(sizes, most)
    total = sum(sizes.values())
    assert sum(quotas.values()) == (total if most is None else min(most, total))
    assert all(quotas[domain] <= size for domain, size in sizes.items())
    unfilled = [quotas[domain] for domain, size in sizes.items() if quotas[domain] < size]
    assert not unfilled or max(quotas.values()) - min(unfilled) <= 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{oops",
            "not JSON: Expecting property name enclosed in double quotes in column 2; allowed: one JSON object a line",
        ),
        ([USER], "found a list; allowed: one JSON object a line"),
        ("3", "found a number; allowed: one JSON object a line"),
        ("null", "found null; allowed: one JSON object a line"),
        (
            {"text": "x", "id": 3},
            "found the fields text, id; allowed: one of the fields prompt, question, turns, messages, conversations",
        ),
        ({"prompt": ""}, 'prompt: found ""; allowed: text that is not empty'),
        ({"prompt": " \n"}, 'prompt: found " \n"; allowed: text that is not empty'),
        ({"prompt": 3}, "prompt: found 3; allowed: text, or a list of turns or messages that is not empty"),
        ({"turns": []}, "turns: found []; allowed: text, or a list of turns or messages that is not empty"),
        ({"turns": [""]}, 'turns[0]: found ""; allowed: text that is not empty'),
        ({"prompt": "\ud800"}, "prompt: found half of a surrogate pair; allowed: Unicode text"),
        ({"prompt": "x", "domain": 3}, "domain: found 3; allowed: text that is not empty"),
        ({"prompt": "x", "domain": "\ud800"}, "domain: found half of a surrogate pair; allowed: Unicode text"),
        ({"messages": [{"role": "user"}]}, "messages[0]: found the fields role; allowed: `role` and `content`"),
        ({"messages": [USER, "x"]}, 'messages[1]: found "x"; allowed: a message with `role` and `content`'),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            'messages[0].role: found "tool"; allowed: system, user, human, assistant, gpt',
        ),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "messages[0].role: found assistant; allowed here: user",
        ),
        ({"messages": [USER, USER]}, "messages[1].role: found user; allowed here: assistant"),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            "messages[1]: found no message after the system message; allowed: a user message",
        ),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages[0].content: found ['x']; allowed: text that is not empty",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    write(tmp_path, {"prompt": "fine"}, line)
    assert refusal(tmp_path) == f"DIR/prompts.jsonl:2: {message}"


def test_a_line_without_the_recipes_field(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "x"})
    assert (
        refusal(tmp_path, field="text") == "DIR/prompts.jsonl:1: found the fields prompt; allowed: `text` (data.field)"
    )


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert refusal(tmp_path) == "DIR/prompts.jsonl:2: found the byte 0xff; allowed: UTF-8 text"


def test_missing_empty_and_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "DIR/prompts.jsonl: no such file; allowed: a JSONL file of prompts (data.prompts)"
    write(tmp_path)
    assert refusal(tmp_path) == "DIR/prompts.jsonl: found an empty file; allowed: one JSON object a line"
    (tmp_path / "prompts.jsonl").unlink()
    (tmp_path / "prompts.jsonl").mkdir()
    assert refusal(tmp_path) == "DIR/prompts.jsonl: found a folder; allowed: a JSONL file of prompts (data.prompts)"


def test_too_few_prompts(tmp_path: Path) -> None:
    write(tmp_path, *many("a", 9), *many("b", 1))
    assert refusal(tmp_path) == (
        "DIR/prompts.jsonl: domain `b`: found 1 prompt; allowed: at least 2, one to train on and one held out"
    )
    write(tmp_path, *many("a", 9), *many("b", 9))
    assert refusal(tmp_path, max_prompts=3) == (
        "DIR/recipe.yaml: data.max_prompts: found 3; allowed: at least 4, one prompt to train on and one held out for "
        "each of the 2 domains of DIR/prompts.jsonl"
    )


def test_prompts_that_do_not_fit_a_row(tmp_path: Path) -> None:
    file = write(tmp_path, *many("a", 3))
    prompts = read(tmp_path)
    check_prompt_lengths(file, prompts, [10, 24, 12], answer_tokens=40, row_tokens=64, max_model_len=64)
    with pytest.raises(InputError) as caught:
        check_prompt_lengths(file, prompts, [10, 25, 12], answer_tokens=40, row_tokens=64, max_model_len=100)
    assert str(caught.value) == (
        f"{file}:2: found a prompt of 25 tokens, with an answer of up to 40 (data.answer.max_tokens) 65; allowed: 64 "
        "(training.row_tokens)"
    )
    with pytest.raises(InputError) as caught:
        check_prompt_lengths(file, prompts, [10, 12, 25], answer_tokens=40, row_tokens=640, max_model_len=64)
    assert str(caught.value) == (
        f"{file}:3: found a prompt of 25 tokens, with an answer of up to 40 (data.answer.max_tokens) 65; allowed: 64 "
        "(the target's longest text)"
    )


def test_what_the_tokenizer_refuses_is_named(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            tokenize(str(folder), {"p.jsonl:7": [USER]}, {}, False)
        return str(caught.value)

    assert len(tokenize(str(folder), {"p.jsonl:7": [USER], "p.jsonl:9": [USER]}, {}, False)) == 2
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    assert refused() == "p.jsonl:7: the target's chat template refuses it: no user"
    (folder / "chat_template.jinja").write_text("{% if")
    assert refused().startswith("p.jsonl:7: the target's chat template refuses it: ")
    (folder / "tokenizer.json").write_text("{")
    assert refused().startswith(f"{folder}: its tokenizer cannot be loaded: ")
