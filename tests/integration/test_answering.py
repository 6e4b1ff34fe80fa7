"""Answering prompts while replicas die: real Ray actors, whose answers are a function of the prompt."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from draftline.recipe.schema import Answer
from draftline.samples.answer import answer_prompts
from draftline.samples.parts import AnswerParts
from draftline.samples.prompts import Prompt
from draftline.samples.rows import Sample
from draftline.storage.local import LocalStore
from draftline.storage.workspace import Workspace
from draftline.targets.engine import Completion


@ray.remote(num_cpus=0, max_concurrency=100)
class Replica:
    """Answers with the prompt reversed; its process ends after `lives` answers."""

    def __init__(self, lives: int) -> None:
        self._lives = lives

    def answer(self, sample: int, ids: list[int], *_: Any) -> Completion:
        time.sleep(0.01)
        self._lives -= 1
        if self._lives < 0:
            os._exit(1)
        return Completion(tuple(reversed(ids)), "stop", 0.01)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


PROMPTS = [
    Prompt(number=n, domain="sums", messages=({"role": "user", "content": str(n)},), held_out=n % 5 == 0, line=n + 1)
    for n in range(100)
]
IDS = [[1, n + 2, 3] for n in range(100)]


def right(samples: Sequence[Sample]) -> bool:
    return [sample.token_ids for sample in samples] == [(1, n + 2, 3, 3, n + 2, 1) for n in range(100)]


def test_prompts_of_a_dead_replica_are_asked_again() -> None:
    first = [Replica.remote(10), Replica.remote(1000)]  # type: ignore[attr-defined]
    losses: list[Exception] = []

    def on_loss(error: Exception) -> list[Any]:
        losses.append(error)
        return [first[1], Replica.remote(1000)]  # type: ignore[attr-defined]

    samples = answer_prompts(first, PROMPTS, IDS, Answer(), 0, on_loss=on_loss)
    assert right(samples)
    assert len(losses) == 1


def test_what_was_answered_before_the_end_is_not_asked_again(tmp_path: Path) -> None:
    parts = AnswerParts(Workspace(LocalStore(tmp_path), "first", tmp_path / "first"), tmp_path / "first" / "parts")
    with pytest.raises(ray.exceptions.RayActorError):
        answer_prompts([Replica.remote(60)], PROMPTS, IDS, Answer(), 0, keep=parts.add)  # type: ignore[attr-defined]
    known = parts.read()
    assert len(known) >= 10  # what was on its way back when the replica died is lost
    second = Replica.remote(100 - len(known))  # type: ignore[attr-defined] # enough for the rest, and no more
    assert right(answer_prompts([second], PROMPTS, IDS, Answer(), 0, known=known))


def test_a_damaged_part_is_dropped_and_an_answer_to_another_prompt_is_not_used(tmp_path: Path) -> None:
    parts = AnswerParts(Workspace(LocalStore(tmp_path), "first", tmp_path / "first"), tmp_path / "first" / "parts")
    parts.add([Sample(0, "sums", True, (9, 9, 9, 9), 3, "stop")])
    parts.add([Sample(1, "sums", False, (1, 3, 3, 8), 3, "stop")])
    replica = Replica.remote(99)  # type: ignore[attr-defined]
    samples = answer_prompts([replica], PROMPTS, IDS, Answer(), 0, known=parts.read())
    assert samples[0].token_ids == (1, 2, 3, 3, 2, 1)
    assert samples[1].token_ids == (1, 3, 3, 8)
    for file in (tmp_path / "first" / "parts").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert parts.read() == []
    assert list((tmp_path / "first").rglob("*.parquet")) == []
