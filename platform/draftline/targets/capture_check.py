"""The capture check: before any training, prove on some samples that the captured hidden states are the target's.

Real defects that it stops: states of zeros, taps that are off by one, a last layer without its final residual. It
needs no knowledge of the target's architecture beyond its final norm and its output head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.errors import RunFailed

if TYPE_CHECKING:
    import torch

# How far below the best logit the target's own token may lie: two kernels may round a near tie differently.
TIE_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5, "float16": 0.1}
SAME_LAYER = 1e-4
READ_TIMEOUT_S = 60.0


class CaptureFailed(RunFailed):
    """The captured hidden states are not the target's; the message names the layer and the numbers."""


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What was compared."""

    samples: int
    positions: int
    near_ties: int


def load_head(target: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's final norm and output head, [T, H] -> logits [T, V], from its safetensors (only these two)."""
    from types import SimpleNamespace as Named

    import torch
    from speculators.models.utils import get_verifier_config, resolve_verifier_norm_class
    from speculators.utils.loading import load_model_layers

    config = get_verifier_config(str(target))
    verifier = Named(
        speculators_config=Named(verifier=Named(name_or_path=str(target)))
    )  # where speculators looks it up
    weights = load_model_layers(["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], str(target))
    projection = weights.get("lm_head.weight", weights["embed_tokens.weight"]).float()
    norm = resolve_verifier_norm_class(verifier)(config.hidden_size, eps=config.rms_norm_eps).float()
    norm.load_state_dict({"weight": weights["model.norm.weight"]})
    norm.requires_grad_(False)

    def head(last_hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return norm(last_hidden.float()) @ projection.T

    return head


def check_states(
    sample: int,
    hidden_states: torch.Tensor,  # [T, taps + 1, H]; the last entry is the target's last layer, before its final norm
    expected: Sequence[tuple[int, int]],
    tap_layers: Sequence[int],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[int, int]:
    """Checks one sample. `expected` holds (position, greedy next token of the target) pairs.

    Returns (positions compared, near ties). Raises `CaptureFailed`.
    """
    import torch

    names = [f"tap layer {layer}" for layer in tap_layers] + ["the last layer"]
    if hidden_states.shape[1] != len(names):
        raise CaptureFailed(f"sample {sample}: {hidden_states.shape[1]} layers were captured, {len(names)} are wanted")
    layers = hidden_states.float().unbind(1)
    for name, states in zip(names, layers, strict=True):
        broken = int((~torch.isfinite(states)).sum())
        if broken:
            raise CaptureFailed(f"sample {sample}: {name} has {broken} of {states.numel()} values that are not finite")
        empty = int((states.abs().amax(dim=-1) == 0).sum())
        if empty:
            raise CaptureFailed(f"sample {sample}: {name} is all zero at {empty} of {len(states)} positions")
    for (name, states), (other, following) in pairwise(zip(names, layers, strict=True)):
        difference = float((states - following).norm() / states.norm())
        if difference < SAME_LAYER:
            raise CaptureFailed(
                f"sample {sample}: {name} and {other} hold the same states (relative difference {difference:.1e})"
            )
    return _check_tokens(
        sample, layers[-1], expected, head, TIE_TOLERANCE[str(hidden_states.dtype).removeprefix("torch.")]
    )


def _check_tokens(
    sample: int,
    last_hidden: torch.Tensor,  # [T, H]
    expected: Sequence[tuple[int, int]],
    head: Callable[[torch.Tensor], torch.Tensor],
    tolerance: float,
) -> tuple[int, int]:
    near_ties = 0
    logits = head(last_hidden[[position for position, _ in expected]])
    for row, (position, token) in zip(logits, expected, strict=True):
        best = int(row.argmax())
        if best == token:
            continue
        gap = float(row[best] - row[token])
        if gap > tolerance:
            raise CaptureFailed(
                f"sample {sample}: the last layer at position {position} predicts token {best}, but the target's own "
                f"greedy token is {token} (logit {gap:.3f} lower, {tolerance} allowed): what was captured is not the "
                "target's last layer"
            )
        near_ties += 1
    return len(expected), near_ties


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """One captured sample: its token ids, and the manifest that its hidden states are read by."""

    number: int
    token_ids: Sequence[int]
    prompt_tokens: int
    manifest: Mapping[str, Any]


def run_capture_check(
    samples: Sequence[CheckedSample], tap_layers: Sequence[int], target: str, store: Any, greedy: bool
) -> CaptureReport:
    """Reads each sample's states from the store and checks them; a task, since it needs torch.

    `greedy` says that the answers are the target's greedy ones, so that every answer token is compared; otherwise the
    one greedy token that the replica returned is. Raises `CaptureFailed`, `StatesLost`.
    """
    from draftline.hidden_states.store import StatesReader

    reader = StatesReader(store)
    head = load_head(Path(target))
    positions = near_ties = 0
    for sample in samples:
        states = reader.read(sample.manifest, READ_TIMEOUT_S)["hidden_states"]
        reader.delete(sample.manifest["handle"])
        last = len(sample.token_ids) - 1
        expected = [(last, int(sample.manifest["next_token_id"]))]
        if greedy:
            expected += [(p, sample.token_ids[p + 1]) for p in range(sample.prompt_tokens - 1, last)]
        compared, tied = check_states(sample.number, states, expected, tap_layers, head)
        positions, near_ties = positions + compared, near_ties + tied
    return CaptureReport(len(samples), positions, near_ties)
