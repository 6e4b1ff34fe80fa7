"""The draft's model and the train loop, on hidden states of the tiny target."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftline.recipe.schema import Draft, Loss, Optimizer, Training
from draftline.training.checkpoint import CheckpointDiffers, CheckpointFolder, trainable_state
from draftline.training.forward import forward_row, loss_arguments
from draftline.training.loop import LoopSettings, Trainer
from draftline.training.model import ATTENTION, DraftModel, build_draft
from draftline.training.records import History
from draftline.training.reproducible import make_reproducible
from draftline.training.rows import Packing, SampleStates, pack_row
from draftline.training.walk import draft_choices, walk, walk_estimate
from states import TinyTarget, tiny_samples
from tiny import TAP_LAYERS, UNUSED_TOKEN

CPU = torch.device("cpu")
KEPT = tuple(range(2, 130))
STEPS = 12


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TinyTarget:
    torch.set_num_threads(1)
    return TinyTarget(tiny_target)


@pytest.fixture(scope="module")
def samples(target: TinyTarget) -> list[SampleStates]:
    return [replace(s, number=100 + place) for place, s in enumerate(tiny_samples(target, 14, TAP_LAYERS))]


def make_draft(target: Path, *, kept: Sequence[int] | None = KEPT, seed: int = 1, **fields: object) -> DraftModel:
    shape = Draft(layers=2, tap_layers=list(TAP_LAYERS), block_size=4, markov_rank=8, **fields)  # type: ignore[arg-type]
    return build_draft(shape, target, kept, UNUSED_TOKEN, accelerator="cpu", seed=seed)


def packing(model: DraftModel) -> Packing:
    return Packing(model.block_size, model.anchor_first, len(TAP_LAYERS), model.hidden_size)


class Rows:
    """A row source over samples in memory; it can be killed at a step, or end there."""

    def __init__(
        self, samples: Sequence[SampleStates], die_at: int | None = None, end_at: int | None = None, first: int = 0
    ) -> None:
        self._samples, self._die_at, self._end_at, self._first = samples, die_at, end_at, first
        self.committed: list[int] = []

    def row(self, step: int) -> Sequence[SampleStates] | None:
        if step == self._die_at:
            raise KeyboardInterrupt
        if step == self._end_at:
            return None
        if step == 3 or not self._samples:
            return []  # a padding row
        return [self._samples[(self._first + 3 * step + offset) % len(self._samples)] for offset in range(3)]

    def commit(self, step: int) -> None:
        self.committed.append(step)


def numbers(rows: Rows) -> list[list[int]]:
    return [[sample.number for sample in rows.row(step) or ()] for step in range(STEPS)]


def trainer(model: DraftModel, folder: Path, name: str = "adamw", saved: Any = None, **settings: int) -> Trainer:
    recipe = Training(
        max_anchors=32,
        evaluate_every_steps=4,
        checkpoint_every_steps=4,
        optimizer=Optimizer(name=name, lr=5e-3),  # type: ignore[arg-type]
    )
    checkpoints = CheckpointFolder(folder, {"recipe": "r"})
    return Trainer(
        model,
        recipe,
        LoopSettings(STEPS, 5, **settings),  # type: ignore[arg-type]
        checkpoints,
        saved=saved or (lambda *_: None),
    )


@pytest.mark.parametrize(
    "fields", [{}, {"block_layout": "one_plus_n"}, {"sliding_window": 9}, {"heads": 8, "kv_heads": 2}]
)
def test_block_attention_equals_the_library_s_dense_mask(
    tiny_target: Path, samples: list[SampleStates], fields: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_draft(tiny_target, **fields)
    monkeypatch.setitem(ATTENTION, "cpu", "eager")
    dense = make_draft(tiny_target, **fields)
    row = pack_row(samples[:3], packing(ours))
    results = []
    for model in (ours, dense):
        loss, metrics = forward_row(
            model, row, loss_arguments(Loss(), "cpu"), max_anchors=40, fixed_anchors=False, seed=3, device=CPU
        )
        loss.backward()
        results.append((loss, metrics, {name: weight.grad for name, weight in model.named_parameters()}))
    (loss, metrics, gradients), (dense_loss, dense_metrics, dense_gradients) = results
    torch.testing.assert_close(loss, dense_loss)
    torch.testing.assert_close(metrics["accept_len_sum"], dense_metrics["accept_len_sum"])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, dense_gradients[name], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("layout", ["anchor_first", "one_plus_n"])
def test_a_sample_gives_the_same_numbers_alone_and_in_a_row(
    tiny_target: Path, samples: list[SampleStates], layout: str
) -> None:
    model = make_draft(tiny_target, block_layout=layout)
    arguments = loss_arguments(Loss(), "cpu")
    # Prompts of one token: without care, blocks at the end of a sample would learn from the next one's answer.
    short = [SampleStates(sample.hidden_states, sample.token_ids, 1) for sample in samples[:3]]

    def sums(row_samples: Sequence[SampleStates]) -> dict[str, float]:
        row = pack_row(row_samples, packing(model))
        _, metrics = forward_row(model, row, arguments, max_anchors=1000, fixed_anchors=False, seed=0, device=CPU)
        return {name: float(metrics[name]) for name in ("accept_len_sum", "accept_len_total", "full_acc_total")}

    together, alone = sums(short), [sums([sample]) for sample in short]
    for name, value in together.items():
        assert value == pytest.approx(sum(part[name] for part in alone), rel=1e-5)
    # every answer token but the first of each sample's row is predicted, at each place of a block that reaches it
    lengths = [len(sample.token_ids) - 1 for sample in short]
    slots = 4 if layout == "anchor_first" else 3
    skipped = 0 if layout == "anchor_first" else 1
    expected = sum(min(slots, length - skipped - start) for length in lengths for start in range(length - skipped))
    assert together["full_acc_total"] == expected


def test_a_row_without_samples_costs_nothing_and_teaches_nothing(tiny_target: Path) -> None:
    model = make_draft(tiny_target)
    row = pack_row([], packing(model))
    loss, _ = forward_row(
        model, row, loss_arguments(Loss(), "cpu"), max_anchors=32, fixed_anchors=False, seed=0, device=CPU
    )
    loss.backward()
    assert loss.item() == 0.0
    for weight in model.parameters():
        if weight.requires_grad:
            assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_learns_and_a_killed_training_resumes_bit_for_bit(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path, name: str
) -> None:
    train, held_out = samples[:-2], [samples[-2:]]
    whole = make_draft(tiny_target)
    rows = Rows(train)
    history = trainer(whole, tmp_path / "whole", name).run(rows, held_out)
    assert rows.committed == list(range(STEPS))
    assert [record.step for record in history.evaluations] == [0, 4, 8, 12]
    assert history.evaluations[-1].loss < 0.9 * history.evaluations[0].loss

    killed = make_draft(tiny_target)
    with pytest.raises(KeyboardInterrupt):
        trainer(killed, tmp_path / "killed", name).run(Rows(train, die_at=10), held_out)
    resumed = make_draft(tiny_target, seed=99)
    again = trainer(resumed, tmp_path / "killed", name)
    assert again.start_step == 8
    resumed_history = again.run(Rows(train), held_out)
    for weight_name, weight in trainable_state(whole).items():
        assert torch.equal(weight, trainable_state(resumed)[weight_name]), weight_name
    assert resumed_history.evaluations == history.evaluations
    assert losses(resumed_history) == losses(history)
    assert list(history.consumed) == [[row] for row in numbers(Rows(train))]
    assert resumed_history.consumed == history.consumed
    assert [folder.name for folder in sorted((tmp_path / "killed").iterdir())] == ["step-00000008", "step-00000012"]


@pytest.mark.parametrize("end_at", [0, 5, 8])
def test_a_training_that_ends_early_goes_on_as_if_it_had_not(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path, end_at: int
) -> None:
    train, held_out = samples[:-2], [samples[-2:]]
    whole = make_draft(tiny_target)
    history = trainer(whole, tmp_path / "whole").run(Rows(train), held_out)

    saves: list[int] = []
    first = trainer(make_draft(tiny_target), tmp_path / "early", saved=lambda step, _: saves.append(step))
    early = first.run(Rows(train, end_at=end_at), held_out)
    assert first.stopped_at == end_at
    assert saves == sorted({*(step for step in (4, 8) if step <= end_at), end_at})  # none is written twice
    assert len(early.consumed) == len(early.steps) == end_at

    resumed = make_draft(tiny_target, seed=99)
    second = trainer(resumed, tmp_path / "early")
    again = second.run(Rows(train), held_out)
    assert (second.start_step, second.stopped_at) == (end_at, None)
    for name, weight in trainable_state(whole).items():
        assert torch.equal(weight, trainable_state(resumed)[name]), name
    assert again.evaluations == history.evaluations
    assert losses(again) == losses(history)
    assert again.consumed == history.consumed


def test_nothing_but_torch_s_seeded_generator_is_drawn_from(tiny_target: Path, samples: list[SampleStates]) -> None:
    model = make_draft(tiny_target)
    row, arguments = pack_row(samples[:3], packing(model)), loss_arguments(Loss(), "cpu")
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-2)
    others = random.getstate(), np.random.get_state()[1].tolist()
    found = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        loss, _ = forward_row(model, row, arguments, max_anchors=8, fixed_anchors=False, seed=3, device=CPU)
        drawn = torch.random.get_rng_state()
        loss.backward()
        found.append(
            (loss.item(), {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None})
        )
        if disturbance == 2:
            optimizer.step()
        assert torch.equal(drawn, torch.random.get_rng_state())  # neither the backward pass nor the optimiser draws
        optimizer.zero_grad()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


def losses(history: History) -> list[float]:
    return [step.loss for step in history.steps]


def test_a_damaged_checkpoint_is_passed_over_and_a_foreign_one_refused(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(make_draft(tiny_target), tmp_path).run(Rows(samples, die_at=9), [samples[:1]])
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    weights = tmp_path / "step-00000008" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    checkpoints = CheckpointFolder(tmp_path, {"recipe": "r"})
    again = Trainer(make_draft(tiny_target), Training(), LoopSettings(STEPS, 5), checkpoints)
    assert again.start_step == 4
    assert checkpoints.damaged == ["step-00000008: weights.safetensors has other bytes"]
    other = CheckpointFolder(tmp_path / "copy", {"recipe": "another"})
    with pytest.raises(CheckpointDiffers, match="another"):
        Trainer(make_draft(tiny_target), Training(), LoopSettings(STEPS, 5), other)


def rank_part(rank: int, target: Path, folder: Path, samples: list[SampleStates]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows = Rows(samples if rank == 0 else samples[:0])
    model = make_draft(target)
    trainer(model, folder / "checkpoints", rank=rank, ranks=2).run(rows, [samples[:2]])
    torch.save(trainable_state(model), folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def rank_resumes(rank: int, target: Path, folder: Path, samples: list[SampleStates]) -> None:
    """Trains without a fault, then once more with a death on all ranks, from whose checkpoint it goes on."""
    make_reproducible(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=3)
    held_out = [samples[:2]]

    def part(name: str, seed: int, die_at: int | None = None) -> Trainer:
        model = make_draft(target, seed=seed)
        one = trainer(model, folder / name, rank=rank, ranks=3)
        try:
            history = one.run(Rows(samples[2:], die_at, first=4 * rank), held_out)
        except KeyboardInterrupt:
            return one
        torch.save(trainable_state(model), folder / f"{name}-{rank}.pt")
        if rank == 0:
            expected = [numbers(Rows(samples[2:], first=4 * other)) for other in range(3)]
            assert list(history.consumed) == [list(step) for step in zip(*expected, strict=True)]
        return one

    part("whole", 1)
    part("killed", 1, die_at=10)
    assert part("killed", 99).start_step == 8
    torch.distributed.destroy_process_group()


def test_three_ranks_that_are_killed_resume_bit_for_bit(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path
) -> None:
    torch.multiprocessing.spawn(rank_resumes, (tiny_target, tmp_path, samples), nprocs=3)
    whole, killed = (torch.load(tmp_path / f"{name}-0.pt") for name in ("whole", "killed"))
    other = torch.load(tmp_path / "killed-2.pt")
    for name, weight in whole.items():
        assert torch.equal(killed[name], weight), name
        assert torch.equal(other[name], weight), name


def test_two_ranks_end_alike_and_a_rank_without_samples_changes_nothing(
    tiny_target: Path, samples: list[SampleStates], tmp_path: Path
) -> None:
    torch.multiprocessing.spawn(rank_part, (tiny_target, tmp_path, samples), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    alone = make_draft(tiny_target)
    trainer(alone, tmp_path / "alone").run(Rows(samples), [samples[:2]])
    for name, weight in trainable_state(alone).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("layout", ["anchor_first", "one_plus_n"])
@pytest.mark.parametrize("draft_tokens", [None, 2])
def test_the_walk_is_what_speculative_decoding_does(
    tiny_target: Path, target: TinyTarget, samples: list[SampleStates], layout: str, draft_tokens: int | None
) -> None:
    model = make_draft(tiny_target, block_layout=layout)
    arguments = loss_arguments(Loss(), "cpu")
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-2)
    sample = samples[0]
    row = pack_row([sample], packing(model))
    for seed in range(15):  # until it has learnt a part of this answer by heart
        loss, _ = forward_row(model, row, arguments, max_anchors=64, fixed_anchors=False, seed=seed, device=CPU)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    estimate = walk_estimate(
        model, sample.hidden_states, sample.token_ids, sample.prompt_tokens, draft_tokens=draft_tokens
    )
    assert estimate == decode(model, sample, draft_tokens)
    assert 0 < estimate[0] < estimate[1] * model.max_draft_tokens


def decode(model: DraftModel, sample: SampleStates, draft_tokens: int | None) -> tuple[int, int]:
    """Speculative decoding, the slow way: each draft token is drafted from the drafted ones before it."""
    count = model.max_draft_tokens if draft_tokens is None else draft_tokens
    true, accepted, blocks = sample.token_ids.tolist(), 0, 0
    anchor = sample.prompt_tokens
    while anchor < len(true) - 1:
        known = true[: anchor + 1]
        drafted: list[int] = []
        for place in range(count):
            ids = torch.tensor(known + drafted)
            states = torch.zeros(len(ids), *sample.hidden_states.shape[1:])
            states[:anchor] = sample.hidden_states[:anchor]  # what a served draft has seen: nothing from the anchor on
            drafted.append(draft_choices(model, states, ids, [anchor], draft_tokens)[0][place])
        right = 0
        while right < count and anchor + right + 1 < len(true) and drafted[right] == true[anchor + right + 1]:
            right += 1
        accepted, blocks, anchor = accepted + right, blocks + 1, anchor + right + 1
    return accepted, blocks


def test_the_walk_needs_as_many_choices_as_the_answer_has_tokens(
    tiny_target: Path, samples: list[SampleStates]
) -> None:
    model, sample = make_draft(tiny_target, kept=None), samples[0]
    choices = draft_choices(
        model, sample.hidden_states, sample.token_ids, range(sample.prompt_tokens, len(sample.token_ids))
    )
    assert len(choices) == len(sample.token_ids) - sample.prompt_tokens
    assert walk(choices, sample.token_ids.tolist(), sample.prompt_tokens)[1] > 0
    with pytest.raises(ValueError, match="outside the sample"):
        draft_choices(model, sample.hidden_states, sample.token_ids, [len(sample.token_ids)])
    with pytest.raises(ValueError, match="9 draft tokens need 9 slots, but blocks have 4"):
        draft_choices(model, sample.hidden_states, sample.token_ids, [0], 9)
