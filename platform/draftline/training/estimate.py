"""The walk estimate as a task: exported draft and captured answers in, acceptance length out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EstimatedSample:
    """One captured prompt and answer."""

    manifest: Mapping[str, Any]
    prompt_tokens: int


def run_walk_estimate(
    draft: str, target: str, samples: Sequence[EstimatedSample], store: Any, draft_tokens: int, accelerator: Any
) -> float:
    """Estimated acceptance length over all samples: 1 + accepted draft tokens / blocks (see `walk`)."""
    from draftline.hidden_states.store import StatesReader
    from draftline.training.model import load_draft
    from draftline.training.walk import walk_estimate

    reader = StatesReader(store)
    model, _ = load_draft(Path(draft), Path(target), accelerator=accelerator)
    accepted = blocks = 0
    for sample in samples:
        states = reader.read(sample.manifest, READ_TIMEOUT_S)
        reader.delete(sample.manifest["handle"])
        more_accepted, more_blocks = walk_estimate(
            model, states["hidden_states"], states["token_ids"], sample.prompt_tokens, draft_tokens=draft_tokens
        )
        accepted, blocks = accepted + more_accepted, blocks + more_blocks
    if not blocks:
        raise ValueError("no answer is long enough to draft in")
    return 1 + accepted / blocks
