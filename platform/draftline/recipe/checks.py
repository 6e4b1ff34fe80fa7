"""What a recipe must agree with before a run starts: the target's figures (`check_recipe`) and this machine
(`check_machine`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from draftline.cluster.preflight import available_memory_bytes, require_free_port
from draftline.errors import InputError
from draftline.recipe.schema import Recipe
from draftline.recipe.sizes import in_units, memory_estimate_bytes, row_states_bytes, states_bytes_per_token
from draftline.serving.config import OWN_ENGINE_ARGS
from draftline.targets.engine_args import engine_arg_names
from draftline.targets.resolve import ResolvedTarget
from draftline.targets.tokens import find_mask_token, read_vocabulary

# The store drops unread hidden states above about 0.9 of its segments, and says nothing; this keeps clear of it.
STORE_FILL = 0.8
# Less is no buffer: a client of the store keeps its own messages in it too.
_LEAST_BUFFER_BYTES = 1 << 20


def check_recipe(recipe: Recipe, recipe_file: Path, target: ResolvedTarget) -> None:
    """Raises InputError when the recipe does not fit its target or itself, a line a problem: `FILE: key: found ...`."""
    problems = [
        *_tap_problems(recipe, target),
        *_draft_problems(recipe, target),
        *_engine_problems(recipe),
        *_length_problems(recipe, target),
        *_window_problems(recipe, target),
        *_limit_problems(recipe, target),
    ]
    if problems:
        raise InputError("\n".join(f"{recipe_file}: {problem}" for problem in problems))


def check_machine(
    recipe: Recipe, recipe_file: Path, target: ResolvedTarget, *, available_bytes: int | None = None
) -> None:
    """Raises InputError when this machine has too little free memory for the run, or serving's port is in use.

    For runs on one CPU machine; `available_bytes` replaces what the machine says is free.
    """
    needed = memory_estimate_bytes(recipe, target)
    free = available_memory_bytes() if available_bytes is None else available_bytes
    if needed > free:
        raise InputError(
            f"{recipe_file}: found {in_units(free)} of free memory; allowed: at least {in_units(needed)}, what this "
            "run needs by a rough estimate. Smaller values of hidden_states.window_bytes, hidden_states.replicas, "
            "training.max_anchors or draft.vocab_size need less"
        )
    require_free_port(recipe.serving.host, recipe.serving.port, f"{recipe_file}: serving.port")


def _tap_problems(recipe: Recipe, target: ResolvedTarget) -> Iterator[str]:
    outside = [layer for layer in recipe.draft.tap_layers if layer >= target.layers]
    if outside:
        yield (
            f"draft.tap_layers: found {', '.join(map(str, outside))}; allowed: 0 to {target.layers - 1}, because "
            f"{target.name} has {target.layers} layers"
        )


def _draft_problems(recipe: Recipe, target: ResolvedTarget) -> Iterator[str]:
    draft = recipe.draft
    if draft.vocab_size is not None and draft.vocab_size > target.vocab_size:
        yield f"draft.vocab_size: found {draft.vocab_size}; allowed: at most {target.vocab_size}, as the target"
    try:
        find_mask_token(target, draft.mask_token_id)
        in_use = read_vocabulary(target.path).in_use
    except InputError as error:
        yield str(error)
        in_use = frozenset()
    if draft.vocab_size is not None and draft.vocab_size < len(in_use):
        least = len(in_use)
        yield f"draft.vocab_size: found {draft.vocab_size}; allowed: at least {least}, the target's special tokens"
    if outside := [token for token in sorted(in_use) if not 0 <= token < target.vocab_size]:
        yield f"target: found the special token id {outside[0]}; allowed: less than {target.vocab_size}, its vocabulary"
    heads, kv_heads = draft.heads or target.heads, draft.kv_heads or target.kv_heads
    if heads % kv_heads:
        yield f"draft.heads: found {heads}; allowed: a multiple of the {kv_heads} key/value heads (draft.kv_heads)"
    if draft.head_dim is not None and draft.head_dim % 2:
        yield f"draft.head_dim: found {draft.head_dim}; allowed: an even number, because positions rotate pairs"
    if target.heads % recipe.target.tensor_parallel:
        yield (
            f"target.tensor_parallel: found {recipe.target.tensor_parallel}; allowed: a divisor of the target's "
            f"{target.heads} heads"
        )


def _engine_problems(recipe: Recipe) -> Iterator[str]:
    names = engine_arg_names()
    for name in sorted(recipe.target.engine_args):
        if name in OWN_ENGINE_ARGS:
            yield f"target.engine_args.{name}: set by this project; allowed: the field that stands for it"
        elif names and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean `{near[0]}`?" if near else "allowed: the fields of its AsyncEngineArgs"
            yield f"target.engine_args.{name}: unknown to the installed vLLM; {meant}"


def _length_problems(recipe: Recipe, target: ResolvedTarget) -> Iterator[str]:
    most = target.max_model_len
    # Capturing asks the engine for one token beyond the row.
    if recipe.training.row_tokens + 1 > most:
        yield (
            f"training.row_tokens: found {recipe.training.row_tokens}; allowed: at most {most - 1}, because "
            f"{target.name} takes {most} tokens and capturing adds one"
        )
    if recipe.serving.max_model_len > most:
        longest = recipe.serving.max_model_len
        yield f"serving.max_model_len: found {longest}; allowed: at most {most}, the target's longest text"
    if recipe.evaluation.max_tokens >= recipe.serving.max_model_len:
        yield (
            f"evaluation.max_tokens: found {recipe.evaluation.max_tokens}; allowed: less than "
            f"{recipe.serving.max_model_len} (serving.max_model_len), which holds the prompt too"
        )


def _window_problems(recipe: Recipe, target: ResolvedTarget) -> Iterator[str]:
    states, workers = recipe.hidden_states, recipe.training.workers
    least = workers * row_states_bytes(recipe, target)
    if states.window_bytes < least:
        yield (
            f"hidden_states.window_bytes: found {in_units(states.window_bytes)}; allowed: at least {in_units(least)}, "
            f"one row of {recipe.training.row_tokens} tokens (training.row_tokens) x "
            f"{states_bytes_per_token(recipe, target)} bytes for each of {workers} train worker(s)"
        )
    if states.buffer_bytes < _LEAST_BUFFER_BYTES:
        yield (
            f"hidden_states.buffer_bytes: found {in_units(states.buffer_bytes)}; allowed: at least "
            f"{in_units(_LEAST_BUFFER_BYTES)}"
        )
    offered = states.segment_bytes * states.replicas
    if STORE_FILL * offered < states.window_bytes:
        least_segment = int(states.window_bytes / STORE_FILL / states.replicas)
        yield (
            f"hidden_states.segment_bytes: found {in_units(states.segment_bytes)}; allowed: at least "
            f"{in_units(least_segment)}, so that the window ({in_units(states.window_bytes)}) fills at most "
            f"{STORE_FILL:.0%} of {states.replicas} segment(s)"
        )


def _limit_problems(recipe: Recipe, target: ResolvedTarget) -> Iterator[str]:
    limit, needed = recipe.resources.memory_limit_bytes, memory_estimate_bytes(recipe, target)
    if limit is not None and recipe.resources.accelerator == "cpu" and needed > limit:
        yield (
            f"resources.memory_limit_bytes: found {in_units(limit)}; allowed: at least {in_units(needed)}, what this "
            "run needs by a rough estimate"
        )
