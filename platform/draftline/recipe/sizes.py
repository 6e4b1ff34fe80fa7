"""How many bytes a recipe's parts take: hidden states exactly, memory as a rough estimate. Pure arithmetic."""

from __future__ import annotations

from draftline.hidden_states.capacity import StatesShape
from draftline.recipe.schema import Recipe
from draftline.targets.engine_args import CPU_KV_CACHE_BYTES
from draftline.targets.resolve import ResolvedTarget

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# What the processes of a quickstart run held (proportional set size, rounded): the three processes of an engine and a
# train worker before any weights, and Ray's own processes with the driver.
ENGINE_BASE_BYTES = int(1.8 * GIB)
WORKER_BASE_BYTES = int(0.8 * GIB)
RAY_BASE_BYTES = int(1.0 * GIB)
# Copies of [anchors * block, vocabulary] in float32 that the loss holds at once: logits, the target's logits, both
# distributions, and gradients.
_LOGIT_COPIES = 6
_FLOAT32_BYTES = 4
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_dtype(recipe: Recipe, target: ResolvedTarget) -> str:
    """The type that engines compute in, and so the type of hidden states."""
    if recipe.target.dtype != "auto":
        return recipe.target.dtype
    return "float32" if recipe.resources.accelerator == "cpu" else target.dtype


def states_shape(recipe: Recipe, target: ResolvedTarget) -> StatesShape:
    """What one token's hidden states are: the tap layers and the last layer."""
    return StatesShape(
        len(recipe.draft.tap_layers) + 1, target.hidden_size, _ITEM_BYTES.get(engine_dtype(recipe, target), 2)
    )


def states_bytes_per_token(recipe: Recipe, target: ResolvedTarget) -> int:
    """Bytes of one token's hidden states: the tap layers and the last layer."""
    return states_shape(recipe, target).token_bytes


def cached_token_bytes(recipe: Recipe, target: ResolvedTarget) -> int:
    """Bytes that one token takes in an engine's cache: keys and values of target and draft, and hidden states."""
    layers = target.layers + recipe.draft.layers
    item_bytes = _ITEM_BYTES.get(engine_dtype(recipe, target), 2)
    return 2 * layers * target.kv_heads * target.head_dim * item_bytes + states_bytes_per_token(recipe, target)


def row_states_bytes(recipe: Recipe, target: ResolvedTarget) -> int:
    """Bytes of the hidden states of one full row, which is also the largest sample."""
    return states_shape(recipe, target).sample_bytes(recipe.training.row_tokens)


def draft_parameters(recipe: Recipe, target: ResolvedTarget) -> int:
    """Trainable parameters of the draft, roughly: decoder layers, tap projection, Markov and output heads."""
    draft, hidden = recipe.draft, target.hidden_size
    head_dim = draft.head_dim or target.head_dim
    queries, keys = (draft.heads or target.heads) * head_dim, (draft.kv_heads or target.kv_heads) * head_dim
    layer = 2 * hidden * (queries + keys) + 3 * hidden * (draft.ffn_size or target.ffn_size)
    vocabulary = draft.vocab_size or target.vocab_size
    markov = draft.markov_rank * (target.vocab_size + vocabulary)
    return draft.layers * layer + len(draft.tap_layers) * hidden * hidden + markov + vocabulary * hidden


def memory_estimate_bytes(recipe: Recipe, target: ResolvedTarget) -> int:
    """Host memory that the processes of a run on one CPU machine take together at their peak; a rough estimate.

    The largest of three times: training (target replicas, the window, transfer buffers and train workers together),
    evaluation (an engine with the draft and one without) and serving, each with Ray's own processes.
    """
    replicas, workers = recipe.hidden_states.replicas, recipe.training.workers
    weights = (
        target.weights_bytes * _ITEM_BYTES[_known(engine_dtype(recipe, target))] // _ITEM_BYTES[_known(target.dtype)]
    )
    engine = ENGINE_BASE_BYTES + CPU_KV_CACHE_BYTES + weights
    draft = draft_parameters(recipe, target) * _FLOAT32_BYTES
    buffers = recipe.hidden_states.buffer_bytes * (replicas + workers)
    worker = WORKER_BASE_BYTES + _worker_bytes(recipe, target)
    training = replicas * engine + workers * worker + recipe.hidden_states.window_bytes + buffers
    evaluation = 2 * engine + draft
    serving = recipe.serving.replicas * (engine + draft)
    return RAY_BASE_BYTES + max(training, evaluation, serving)


def _worker_bytes(recipe: Recipe, target: ResolvedTarget) -> int:
    """One train worker: weights, gradients and two moments; the target's embedding and head; the rows; the logits."""
    state = 4 * draft_parameters(recipe, target) * _FLOAT32_BYTES
    frozen = 2 * target.vocab_size * target.hidden_size * _FLOAT32_BYTES
    rows = (recipe.training.prefetch_rows + 1) * row_states_bytes(recipe, target)
    vocabulary = recipe.draft.vocab_size or target.vocab_size
    logits = recipe.training.max_anchors * recipe.draft.block_size * vocabulary * _FLOAT32_BYTES * _LOGIT_COPIES
    return state + frozen + rows + logits


def _known(dtype: str) -> str:
    return dtype if dtype in _ITEM_BYTES else "bfloat16"


def in_units(count: int) -> str:
    """A number of bytes as a recipe would say it: exact in whole GiB or MiB, else rounded up, such as 4.2GiB."""
    if count % MIB == 0 and count:
        return f"{count // GIB}GiB" if count % GIB == 0 else f"{count // MIB}MiB"
    if count > 2 * GIB:
        return f"{-(-count * 10 // GIB) / 10:g}GiB"
    return f"{-(-count // MIB)}MiB" if count > 64 * MIB else f"{-(-count // KIB)}KiB"
