"""What one training is told: plain values and actor handles, sent from the driver to every train worker."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftline.drafts.manifest import Provenance
from draftline.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """Paths are absolute and must be reachable from every train worker."""

    recipe: Recipe
    target: str  # the target's folder, in Hugging Face format
    kept_tokens: tuple[int, ...] | None  # target ids of the draft vocabulary; None: all of the target's
    mask_token_id: int
    steps: int  # of the batch plan
    held_out_positions: int  # of the batch plan: rows before the first step
    prompt_tokens: Mapping[int, int]  # by sample number
    checkpoints: str  # folder
    provenance: Provenance
    feeder: Any  # handle of the Feeder actor
    store: Any  # hidden_states.store.StoreConfig
    board: Any = None  # handle of an actor with `update(dict)` and `lost(str)`, or None
    workspace: Any = None  # storage.workspace.Workspace that checkpoints are published to; None: kept here only
    token_digests: Mapping[int, int] = field(default_factory=dict)  # by sample number; one that is absent isn't checked


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a training gives back."""

    figures: Mapping[str, float]  # eal_start, eal_held_out, data_wait_share, ... (see records.History.figures)
    history: Mapping[str, Any]  # all records (see records.History.as_dict)
    resumed_from: int  # step of the checkpoint that training began with; 0: from the start
    seconds: Mapping[str, float] = field(default_factory=dict)  # set-up, training
    stopped_at: int | None = None  # steps done when it was asked to end early; None: it went to the last step
    damaged_checkpoints: Sequence[str] = ()  # names and reasons of those that were passed over


def token_digest(token_ids: Sequence[int]) -> int:
    """A few bits that tell one sample's token ids from another's, cheap enough to send for every sample."""
    return zlib.crc32(array("q", token_ids).tobytes())
