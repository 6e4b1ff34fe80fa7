"""A recipe against its target and its machine: one line for each thing that cannot work."""

import json
import socket
from pathlib import Path

import pytest

from draftline.errors import InputError
from draftline.recipe.checks import check_machine, check_recipe
from draftline.recipe.load import load_recipe
from draftline.recipe.sizes import in_units, memory_estimate_bytes, row_states_bytes, states_bytes_per_token
from draftline.targets.resolve import ResolvedTarget, describe_target

RECIPE = """\
run_id: first
target: {path: model}
data: {prompts: prompts.jsonl, answer: {max_tokens: 64}}
draft: {tap_layers: [1, 2], vocab_size: 8}
training: {row_tokens: 128}
evaluation: {max_tokens: 64}
serving: {max_model_len: 512, port: 0}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def target(tmp_path: Path) -> ResolvedTarget:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "vocab_size": 16,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    special = [{"id": token, "content": f"<{token}>", "special": True} for token in (2, 3)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": special}))
    (folder / "chat_template.jinja").write_text("<2><3>")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return describe_target(folder, name="tiny", label="target")


def refusal(recipe_file: Path, target: ResolvedTarget, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        check_recipe(load_recipe(recipe_file, overrides), recipe_file, target)
    return str(caught.value).replace(str(recipe_file), "FILE")


def test_a_recipe_that_fits_passes(recipe_file: Path, target: ResolvedTarget) -> None:
    recipe = load_recipe(recipe_file)
    check_recipe(recipe, recipe_file, target)
    check_machine(recipe, recipe_file, target, available_bytes=8 << 30)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.tap_layers=[1, 4, 9]", "draft.tap_layers: found 4, 9; allowed: 0 to 3, because tiny has 4 layers"),
        ("draft.vocab_size=17", "draft.vocab_size: found 17; allowed: at most 16, as the target"),
        ("draft.vocab_size=1", "draft.vocab_size: found 1; allowed: at least 2, the target's special tokens"),
        (
            "target.engine_args={model: x}",
            "target.engine_args.model: set by this project; allowed: the field that stands for it",
        ),
        (
            "target.engine_args={enable_prefix_cachin: true}",
            "target.engine_args.enable_prefix_cachin: unknown to the installed vLLM; did you mean "
            "`enable_prefix_caching`?",
        ),
        ("hidden_states.buffer_bytes=0", "hidden_states.buffer_bytes: found 0KiB; allowed: at least 1MiB"),
        ("draft.mask_token_id=16", "draft.mask_token_id: found 16; allowed: less than 16, the target's vocabulary"),
        (
            "draft.mask_token_id=1",
            "draft.mask_token_id: found 1, a token of ordinary text; allowed: a token id that the target never "
            "uses, such as 15, 14, 13",
        ),
        ("draft.heads=3", "draft.heads: found 3; allowed: a multiple of the 2 key/value heads (draft.kv_heads)"),
        ("draft.head_dim=15", "draft.head_dim: found 15; allowed: an even number, because positions rotate pairs"),
        ("target.tensor_parallel=3", "target.tensor_parallel: found 3; allowed: a divisor of the target's 4 heads"),
        (
            "training.row_tokens=512",
            "training.row_tokens: found 512; allowed: at most 511, because tiny takes 512 tokens and capturing adds "
            "one",
        ),
        (
            "serving.max_model_len=513",
            "serving.max_model_len: found 513; allowed: at most 512, the target's longest text",
        ),
        (
            "evaluation.max_tokens=512",
            "evaluation.max_tokens: found 512; allowed: less than 512 (serving.max_model_len), which holds the "
            "prompt too",
        ),
        (
            "hidden_states.window_bytes=64KiB",
            "hidden_states.window_bytes: found 64KiB; allowed: at least 98KiB, one row of 128 tokens "
            "(training.row_tokens) x 768 bytes for each of 1 train worker(s)",
        ),
        (
            "hidden_states.segment_bytes=512MiB",
            "hidden_states.segment_bytes: found 512MiB; allowed: at least 640MiB, so that the window (512MiB) fills "
            "at most 80% of 1 segment(s)",
        ),
    ],
)
def test_what_does_not_fit_the_target(recipe_file: Path, target: ResolvedTarget, override: str, message: str) -> None:
    assert refusal(recipe_file, target, override) == f"FILE: {message}"


def test_all_problems_come_in_one_message(recipe_file: Path, target: ResolvedTarget) -> None:
    message = refusal(recipe_file, target, "draft.vocab_size=17", "training.row_tokens=512", "draft.heads=3")
    assert [line.split(":")[1].strip() for line in message.splitlines()] == [
        "draft.vocab_size",
        "draft.heads",
        "training.row_tokens",
    ]


def test_a_window_holds_a_row_of_every_worker(recipe_file: Path, target: ResolvedTarget) -> None:
    recipe = load_recipe(recipe_file)
    assert states_bytes_per_token(recipe, target) == 3 * 64 * 4  # two taps and the last layer, float32 on a CPU
    least = 2 * row_states_bytes(recipe, target)
    two_workers = ("training.workers=2", f"hidden_states.window_bytes={least}")
    check_recipe(load_recipe(recipe_file, two_workers), recipe_file, target)
    too_small = ("training.workers=2", f"hidden_states.window_bytes={least - 1}")
    assert "for each of 2 train worker(s)" in refusal(recipe_file, target, *too_small)


def test_hidden_states_have_the_engines_type(recipe_file: Path, target: ResolvedTarget) -> None:
    gpu = load_recipe(recipe_file, ["resources.accelerator=gpu"])
    assert states_bytes_per_token(gpu, target) == 3 * 64 * 2  # the stored type
    chosen = load_recipe(recipe_file, ["resources.accelerator=gpu", "target.dtype=float32"])
    assert states_bytes_per_token(chosen, target) == 3 * 64 * 4


def test_too_little_memory(recipe_file: Path, target: ResolvedTarget) -> None:
    recipe = load_recipe(recipe_file)
    needed = in_units(memory_estimate_bytes(recipe, target))
    with pytest.raises(InputError) as caught:
        check_machine(recipe, recipe_file, target, available_bytes=1 << 30)
    assert str(caught.value) == (
        f"{recipe_file}: found 1GiB of free memory; allowed: at least {needed}, what this run needs by a rough "
        "estimate. Smaller values of hidden_states.window_bytes, hidden_states.replicas, training.max_anchors or "
        "draft.vocab_size need less"
    )
    assert refusal(recipe_file, target, "resources.memory_limit_bytes=1GiB") == (
        f"FILE: resources.memory_limit_bytes: found 1GiB; allowed: at least {needed}, what this run needs by a rough "
        "estimate"
    )


def test_more_of_everything_needs_more_memory(recipe_file: Path, target: ResolvedTarget) -> None:
    least = memory_estimate_bytes(load_recipe(recipe_file), target)
    for more in (
        "hidden_states.replicas=3",
        "training.workers=9",
        "hidden_states.window_bytes=9GiB",
        "draft.layers=9",
        "draft.vocab_size=16",
        "serving.replicas=4",
    ):
        assert memory_estimate_bytes(load_recipe(recipe_file, [more]), target) > least


def test_a_port_in_use(recipe_file: Path, target: ResolvedTarget) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        recipe = load_recipe(recipe_file, [f"serving.port={port}"])
        with pytest.raises(InputError) as caught:
            check_machine(recipe, recipe_file, target, available_bytes=8 << 30)
    assert str(caught.value) == (
        f"{recipe_file}: serving.port: port {port} on 127.0.0.1 cannot be used (Address already in use); free it, or "
        "name another (0: any)"
    )
    check_machine(recipe, recipe_file, target, available_bytes=8 << 30)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0KiB"),
        (1, "1KiB"),
        (96 << 10, "96KiB"),
        (1 << 20, "1MiB"),
        ((100 << 20) + 1, "101MiB"),
        (3 << 29, "1536MiB"),
        (5 << 30, "5GiB"),
        ((5 << 30) + 1, "5.1GiB"),
    ],
)
def test_bytes_in_units_round_up(count: int, text: str) -> None:
    assert in_units(count) == text
