"""The DSpark draft: speculators' model, shaped by the recipe and by the target it learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.utils import get_verifier_config, resolve_draft_intermediate_size
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

from draftline.recipe.schema import Draft
from draftline.training.attention import BLOCK_ATTENTION, BlockMask, block_mask

Accelerator = Literal["cpu", "gpu"]
ATTENTION = {"cpu": BLOCK_ATTENTION, "gpu": "simple_flex_attention"}


class DraftModel(DSparkDraftModel):
    """speculators' DSpark model with block attention on CPUs, and blocks that end where their sample ends."""

    def _create_attention_mask(
        self,
        document_ids: Tensor,
        total_seq_len: int,
        anchor_positions: Tensor,
        device: torch.device,
        sliding_window: int | None = None,
        sliding_window_non_causal: bool = False,
    ) -> BlockMask | Any:
        if self._attn_impl != BLOCK_ATTENTION:
            return super()._create_attention_mask(
                document_ids, total_seq_len, anchor_positions, device, sliding_window, sliding_window_non_causal
            )
        causal = sliding_window is not None and not sliding_window_non_causal
        return block_mask(document_ids[0], anchor_positions, self.block_size, sliding_window, causal)

    def _backbone_forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        loss_mask: Tensor,
        verifier_last_hidden_states: Tensor,
        document_ids: Tensor,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        hidden, logits, targets, mask, indices = super()._backbone_forward(
            hidden_states, input_ids, loss_mask, verifier_last_hidden_states, document_ids, position_ids, **kwargs
        )
        # A block near the end of its sample reaches into the next sample of the row, which it must not learn from.
        samples = document_ids[0, indices].view(-1, self.block_size)
        same = (samples == samples[:, :1]).view(1, -1)
        return hidden, logits, targets, mask * same.to(mask.dtype), indices

    def block_outputs(
        self, hidden_states: Tensor, input_ids: Tensor, loss_mask: Tensor, anchors: int
    ) -> tuple[Tensor, Tensor]:
        """Hidden [anchors, slots, H] and logits without Markov bias [anchors, slots, draft vocabulary] of one sample.

        `hidden_states` [1, T, taps * H], `input_ids` and `loss_mask` [1, T]; a block starts at each of the `anchors`
        positions whose loss mask is set.
        """
        last = hidden_states[..., : self.hidden_size]  # only the training targets come from it: unused here
        documents = torch.zeros_like(input_ids)
        hidden, logits, *_ = self._backbone_forward(
            hidden_states, input_ids, loss_mask, last, documents, max_anchors=anchors
        )
        return hidden.view(anchors, self.block_size, -1), logits.view(anchors, self.block_size, -1)

    @property
    def anchor_first(self) -> bool:
        """True: slot 0 drafts the token after the anchor; False: slot 1 does (1+N)."""
        return bool(self.config.sample_from_anchor)

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @contextmanager
    def block_of(self, draft_tokens: int) -> Iterator[None]:
        """Blocks that draft `draft_tokens` tokens: serving with fewer than a block drafts runs shorter blocks."""
        trained = self.block_size
        slots = draft_tokens if self.anchor_first else draft_tokens + 1
        if draft_tokens < 1 or slots > trained:
            raise ValueError(f"{draft_tokens} draft tokens need {slots} slots, but blocks have {trained}")
        self.block_size = slots
        try:
            yield
        finally:
            self.block_size = trained


def build_draft(
    draft: Draft,
    target: Path,
    kept_tokens: Sequence[int] | None,
    mask_token_id: int,
    *,
    accelerator: Accelerator,
    seed: int,
) -> DraftModel:
    """A fresh draft in float32 for the target in folder `target`; the same seed gives the same weights.

    `kept_tokens` are the target ids of the draft vocabulary, sorted; None: the target's whole vocabulary.
    """
    verifier = get_verifier_config(str(target))
    vocab_size = verifier.vocab_size
    to_draft = to_target = None
    if kept_tokens is not None and len(kept_tokens) < vocab_size:
        kept = torch.tensor(sorted(kept_tokens))
        to_draft = torch.zeros(vocab_size, dtype=torch.bool)
        to_draft[kept] = True
        to_target = kept - torch.arange(len(kept))  # speculators keeps the distance from draft id to target id
    torch.manual_seed(seed)
    model = DraftModel.from_training_args(
        decoder_config(draft, verifier),
        to_draft,
        to_target,
        verifier_name_or_path=str(target),
        draft_vocab_size=vocab_size if to_target is None else len(to_target),
        block_size=draft.block_size,
        target_layer_ids=list(draft.tap_layers),
        mask_token_id=mask_token_id,
        markov_rank=draft.markov_rank,
        sample_from_anchor=draft.block_layout == "anchor_first",
        # vLLM serves DSpark's sliding layers causal within a block, and its full layers not.
        sliding_window_non_causal=draft.sliding_window is None,
        draft_attn_impl=ATTENTION[accelerator],
    )
    return model.float()


def decoder_config(draft: Draft, verifier: PretrainedConfig) -> Qwen3Config:
    """The draft's layers: the target's shape unless the recipe says otherwise."""
    heads = draft.heads or verifier.num_attention_heads
    target_head_dim = getattr(verifier, "head_dim", None) or verifier.hidden_size // verifier.num_attention_heads
    layer_type = "full_attention" if draft.sliding_window is None else "sliding_attention"
    return Qwen3Config(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=draft.ffn_size or resolve_draft_intermediate_size(verifier),
        num_hidden_layers=draft.layers,
        num_attention_heads=heads,
        num_key_value_heads=draft.kv_heads or min(heads, getattr(verifier, "num_key_value_heads", heads) or heads),
        head_dim=draft.head_dim or target_head_dim,
        hidden_act="silu",
        max_position_embeddings=verifier.max_position_embeddings,
        rms_norm_eps=verifier.rms_norm_eps,
        rope_parameters=_plain_rope(verifier),
        attention_bias=False,
        tie_word_embeddings=False,
        use_sliding_window=draft.sliding_window is not None,
        sliding_window=draft.sliding_window,
        layer_types=[layer_type] * draft.layers,
    )


def _plain_rope(verifier: PretrainedConfig) -> dict[str, Any]:
    """Rotary embedding of the target's base without its long-context scaling, which the draft has no need of."""
    parameters = getattr(verifier, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or getattr(verifier, "rope_theta", None) or 10000.0
    return {"rope_type": "default", "rope_theta": float(theta)}


def load_draft(folder: Path, target: Path, *, accelerator: Accelerator) -> tuple[DraftModel, dict[str, Any]]:
    """An exported draft in float32 and what transformers says of its loading (`missing_keys`, `unexpected_keys`, ...).

    `target` is the folder that the frozen weights come from, whatever verifier the export names.
    """
    config = DSparkSpeculatorConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(target)
    config.transformer_layer_config._attn_implementation = ATTENTION[accelerator]
    # With `output_loading_info` speculators returns a pair, and leaves the target's weights to the caller.
    loaded: Any = DraftModel.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    model, loading = loaded
    model.load_verifier_weights()
    return model.float().eval(), loading
