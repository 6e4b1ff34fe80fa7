"""DSpark on vLLM's CPU runner: real engines with the tiny target, in this process so that drafts can be watched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.vllm_plugin.confidence import cut_drafts
from tiny import BlockLayout, build_tiny_draft, target_states

QUESTIONS = [
    "Hello",
    "What is 2+2?",
    "Tell me a story about a fox and a very patient hen. " * 3,
    "a",
    "b",
    "Name one colour",
]
BLOCK = 4
ANSWER_TOKENS = 48
MODEL_LEN = 512


@dataclass(frozen=True)
class Draft:
    """One row of the proposer's work: the request's anchor and what was drafted after it."""

    position: int
    anchor: int
    tokens: list[int]


@contextmanager
def engine(target: Path, draft: Path | None = None, tokens: int = 0, **options: Any) -> Iterator[Any]:
    """An in-process engine; prompts are chunked, as they are longer than a batch, and more requests wait than fit."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    args: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": False, **options}
    if draft is not None:
        args |= {
            "worker_cls": "draftline.vllm_plugin.worker.DSparkCPUWorker",
            "speculative_config": {"method": "dspark", "model": str(draft), "num_speculative_tokens": tokens},
        }
    llm = LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        worker_extension_cls="draftline.vllm_plugin.extension.WorkerExtension",
        **args,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """vLLM's CPU worker disables torch.set_num_threads for the process it runs in: put it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        yield


@pytest.fixture(scope="module")
def without_draft(tiny_target: Path) -> tuple[list[list[int]], list[int]]:
    with engine(tiny_target) as llm:
        return answer(llm), run_to_the_limit(llm)


@pytest.fixture
def plain(without_draft: tuple[list[list[int]], list[int]]) -> list[list[int]]:
    """Prompt and greedy answer of every question, without a draft."""
    return without_draft[0]


def answer(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS), use_tqdm=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def run_to_the_limit(llm: Any) -> list[int]:
    """An answer that ends because the model's longest sequence is reached, where a whole block no longer fits."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [token % 200 + 20 for token in range(MODEL_LEN - 20)]}
    sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    tokens = list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)
    assert len(tokens) == 20
    return tokens


def worker_of(llm: Any) -> Any:
    return llm.collective_rpc(_itself)[0]


def _itself(worker: Any) -> Any:
    return worker


def watch(worker: Any) -> list[Draft]:
    """The list that every draft pass from now on is added to, one entry per request of the batch."""
    drafts: list[Draft] = []
    propose: Callable[..., Any] = worker.proposer.propose

    def watched(**inputs: Any) -> Any:
        proposed = propose(**inputs)
        starts, rejected = inputs["common_attn_metadata"].query_start_loc, inputs["num_rejected_tokens_gpu"]
        for row, tokens in enumerate(proposed):
            last = int(starts[row + 1]) - 1 - (0 if rejected is None else int(rejected[row]))
            position = int(inputs["target_positions"][last]) + 1
            drafts.append(Draft(position, int(inputs["next_token_ids"][row]), list(map(int, tokens))))
        return proposed

    worker.proposer.propose = watched
    return drafts


def longest_prompt(sequences: list[list[int]]) -> int:
    """Of the question whose answer is not cut by its end: positions beyond it belong to answers only."""
    return max(len(sequence) for sequence in sequences) - ANSWER_TOKENS


def metric(llm: Any, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}")


@torch.no_grad()
def offline_drafts(
    target: Path, draft: Path, sequences: Sequence[Sequence[int]], cut: float = 0.0
) -> list[list[list[int]]]:
    """What speculators' model itself drafts after each position of each sequence, from transformers' hidden states."""
    from speculators.models.dspark import DSparkDraftModel

    model = DSparkDraftModel.from_pretrained(draft).float().eval()
    model.load_verifier_weights()
    first = 0 if model.config.sample_from_anchor else 1
    padding = [0] * model.block_size  # an anchor needs a whole block after it; context ends before the anchor
    padded = [[*sequence, *padding] for sequence in sequences]
    drafts = []
    for sequence, (taps, last) in zip(padded, target_states(target, padded), strict=True):
        anchors = len(sequence) - len(padding)
        hidden, logits, *_ = model._backbone_forward(
            taps[None],
            torch.tensor([sequence]),
            torch.ones(1, len(sequence), dtype=torch.bool),
            last[None],
            torch.zeros(1, len(sequence), dtype=torch.long),
            max_anchors=anchors,
        )
        hidden, logits = hidden.view(anchors, model.block_size, -1), logits.view(anchors, model.block_size, -1)
        previous, chosen, sure = torch.tensor(sequence[:anchors]), [], []
        for place in range(first, model.block_size):
            embedding = model.markov_head.prev_embeddings(previous)
            sure.append(model.confidence_head(torch.cat([hidden[:, place], embedding], dim=-1)).sigmoid())
            bias = model.markov_head.block_bias(
                prev_token_ids=previous[:, None], hidden_states=hidden[:, place : place + 1]
            )
            previous = (logits[:, place] + bias[:, 0]).argmax(dim=-1)
            if model.d2t is not None:
                previous = previous + model.d2t[previous]
            chosen.append(previous)
        drafts.append(cut_drafts(torch.stack(chosen, dim=1).tolist(), torch.stack(sure, dim=1).tolist(), cut))
    return drafts


def assert_drafts_match(
    seen: list[Draft], sequences: list[list[int]], offline: list[list[list[int]]], most: int
) -> None:
    """Every draft is the first `most` tokens of the offline draft after the same token of one of the sequences."""
    expected: dict[tuple[int, int], list[list[int]]] = {}
    for sequence, drafts in zip(sequences, offline, strict=True):
        for position, (anchor, tokens) in enumerate(zip(sequence, drafts, strict=True)):
            expected.setdefault((position, anchor), []).append(tokens)
    wrong = [d for d in seen if all(tokens[:most] != d.tokens for tokens in expected[d.position, d.anchor])]
    assert not wrong, f"{len(wrong)} of {len(seen)} drafts differ, the first: {wrong[0]}"


@pytest.mark.parametrize(
    ("layout", "draft_vocab", "tokens", "prefix_caching"),
    [
        ("anchor_first", None, BLOCK, False),
        ("anchor_first", 80, 1, True),
        ("one_plus_n", None, 2, True),
        ("one_plus_n", 80, BLOCK - 1, False),
    ],
)
def test_drafts_are_the_models_own_and_answers_stay_the_same(
    tiny_target: Path,
    without_draft: tuple[list[list[int]], list[int]],
    tmp_path: Path,
    layout: BlockLayout,
    draft_vocab: int | None,
    tokens: int,
    prefix_caching: bool,
) -> None:
    plain, limited = without_draft
    draft = build_tiny_draft(
        tiny_target,
        tmp_path / "draft",
        block_size=BLOCK,
        block_layout=layout,
        draft_vocab=draft_vocab,
        memorise=plain[:4],
    )
    with engine(tiny_target, draft, tokens, enable_prefix_caching=prefix_caching) as llm:
        seen = watch(worker_of(llm))
        first = answer(llm)
        again = answer(llm)
        accepted, drafted, passes = (metric(llm, name) for name in ("accepted_tokens", "draft_tokens", "drafts"))
        answered = [d for d in seen if d.position > longest_prompt(plain)]
        assert run_to_the_limit(llm) == limited
    assert first == plain
    assert again == plain
    assert {len(d.tokens) for d in seen} == {tokens}
    assert len(answered) > 50
    offline = offline_drafts(tiny_target, draft, plain)
    assert_drafts_match(answered, plain, offline, tokens)
    assert accepted / passes > 0.2, "the draft was trained on most of these answers; untrained it has 0.01"
    assert drafted == passes * tokens


def test_drafts_are_cut_where_the_model_is_unsure(tiny_target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    draft = build_tiny_draft(tiny_target, tmp_path / "draft", block_size=BLOCK, memorise=plain[:4])
    cut = 0.2
    with engine(tiny_target, draft, BLOCK, additional_config={"draftline": {"confidence_cut": "auto"}}) as llm:
        worker = worker_of(llm)
        assert 0.0 <= worker.proposer.confidence_cut <= 1.0
        assert answer(llm) == plain, "the engine measured itself and left nothing behind"
        llm.collective_rpc("set_confidence_cut", args=(cut,))
        seen = watch(worker)
        assert answer(llm) == plain
        assert llm.collective_rpc("set_confidence_cut", args=(1.0,)) == [cut]
        assert answer(llm) == plain, "no drafts at all"
        threads = torch.get_num_threads()
        assert llm.collective_rpc("set_threads", args=(1,)) == [threads]
        assert torch.get_num_threads() == 1
        llm.collective_rpc("set_threads", args=(threads,))
    answered = [d for d in seen if d.position > longest_prompt(plain) and d.tokens]
    assert len({len(d.tokens) for d in answered}) > 1
    assert_drafts_match(answered, plain, offline_drafts(tiny_target, draft, plain, cut), BLOCK)


def test_more_tokens_than_a_block_drafts_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    draft = build_tiny_draft(tiny_target, tmp_path / "draft", block_size=BLOCK, block_layout="one_plus_n")
    with pytest.raises(ValueError, match="drafts 1 to 3 tokens"), engine(tiny_target, draft, BLOCK):
        pass


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    from draftline.vllm_plugin import patches

    unsupported = VllmConfig._get_v1_model_runner_unsupported_features
    monkeypatch.setattr(patches, "_applied", False)
    monkeypatch.setattr(patches, "vllm_version", "0.33.1")
    patches.apply()
    assert not patches.applied()
    assert VllmConfig._get_v1_model_runner_unsupported_features is unsupported


def test_a_greedy_draft_leaves_the_sampled_distribution_alone() -> None:
    """vLLM takes drafts without probabilities as point masses: an accepted or replaced token is distributed as p."""
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import rejection_sample

    requests, target = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampled = rejection_sample(
        torch.full((requests,), 1, dtype=torch.int32),
        [1] * requests,
        1,
        torch.arange(1, requests + 1, dtype=torch.int32),
        None,
        target.log().expand(requests, -1).contiguous(),
        torch.zeros(requests, 1, dtype=torch.int32),
        sampling(requests, SamplingMetadata),
    )
    share = torch.bincount(sampled[:, 0].long(), minlength=4) / requests
    assert torch.allclose(share, target, atol=0.02), share


def sampling(requests: int, metadata: type) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors

    zeros = torch.zeros(requests)
    return metadata(
        temperature=torch.ones(requests),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        logprob_token_ids=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros,
        output_token_ids=[[] for _ in range(requests)],
        spec_token_ids=[[] for _ in range(requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
