"""DSpark drafting on vLLM's V1 runner: DFlash's parallel backbone, then DSpark's Markov and confidence heads.

A draft pass runs one block of queries per request: the last token that the target emitted (the anchor) and mask tokens,
attending to the target's hidden states of everything before the anchor and, in both directions, to each other. In the
layout `anchor_first` every query predicts its successor; in `one_plus_n` the anchor's query predicts nothing and every
mask predicts its own place. Then the tokens are chosen one by one, the Markov head biasing each by its predecessor.

The whole block always runs, even when fewer tokens are wanted: queries see each other in both directions and training
saw whole blocks only, so a shorter block would be another input than the draft was trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from draftline.vllm_plugin.confidence import cut_drafts


class DSparkProposer(DFlashProposer):
    """Drafts greedily. vLLM's rejection sampler takes such drafts as point masses, so that requests sampled at a
    temperature keep the target's distribution exactly (a draft x is accepted with probability p(x), and the
    replacement is drawn from p without x).
    """

    model: Any  # vLLM's Qwen3DSparkForCausalLM once it is loaded

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        draft = self.draft_model_config.hf_config
        if draft.markov_head_type != "vanilla":
            raise ValueError(f"the draft's markov_head_type is {draft.markov_head_type!r}; vLLM knows vanilla only")
        self.queries = draft.block_size  # per request; `block_size` is the cache's page here
        self.first_query = 0 if draft.sample_from_anchor else 1
        most = self.queries - self.first_query
        if not 1 <= self.num_speculative_tokens <= most:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, but a block of {self.queries} queries "
                f"(sample_from_anchor {draft.sample_from_anchor}) drafts 1 to {most} tokens"
            )
        self.confidence_cut = 0.0
        self._confidences: torch.Tensor | None = None  # [requests, drafted tokens], of the last pass
        self._anchors = torch.empty(0, dtype=torch.int32)  # [requests]
        self._resize_buffers()

    def _resize_buffers(self) -> None:
        """DFlash sizes its buffers for num_speculative_tokens + 1 queries a request."""
        self.max_query_tokens = self.max_batch_size * self.queries
        self.max_padded_query_tokens = max(self.max_query_tokens, self.max_padded_query_tokens)
        tokens = max(self.max_padded_query_tokens, self.max_num_tokens)
        self.max_positions = self.max_num_tokens + self.max_padded_query_tokens
        self.input_ids = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self._slot_mapping_buffer = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self.arange = torch.arange(self.max_positions + 1, dtype=torch.int32, device=self.device)
        self.token_arange_np = np.arange(tokens + 1, dtype=np.int32)

    @property
    def has_confidence_head(self) -> bool:
        """Whether the loaded draft can say how sure it is."""
        return self.model.model.confidence_head is not None

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,  # [tokens]
        next_token_ids: torch.Tensor,  # [requests]
        target_positions: torch.Tensor,  # [tokens]
        target_hidden_states: torch.Tensor,  # [tokens, hidden]
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,  # [requests]
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Lay out context and queries; returns (queries in all, indices of those that predict, their metadata).

        A request's rejected tokens lie at the end of its stretch of `target_*`. Their states are written to the cache
        as well, where this pass's queries overwrite them.
        """
        requests = cad.batch_size()
        tokens = target_token_ids.shape[0]
        starts = cad.query_start_loc[: requests + 1].long()
        rejected = torch.zeros_like(starts[1:]) if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu.long()
        owner = torch.repeat_interleave(torch.arange(requests), starts.diff(), output_size=tokens)
        anchor_positions = target_positions[starts[1:] - rejected - 1] + 1
        offsets = torch.arange(self.queries)

        self._anchors = next_token_ids
        self._dflash_num_context = tokens
        self._dflash_hidden_states = target_hidden_states
        self._context_positions_buffer[:tokens] = target_positions
        self._context_slot_mapping_buffer[:tokens] = self._slots(cad, owner, target_positions)

        total = requests * self.queries
        positions = anchor_positions[:, None] + offsets  # [requests, queries]
        self.positions[:total] = positions.flatten()
        self._slot_mapping_buffer[:total] = self._slots(cad, torch.arange(requests)[:, None], positions).flatten()
        block = self.input_ids[:total].view(requests, self.queries)
        block.fill_(self.parallel_drafting_token_id)
        block[:, 0] = next_token_ids

        predicting = torch.arange(self.first_query, self.first_query + self.num_speculative_tokens)
        indices = (torch.arange(requests)[:, None] * self.queries + predicting).flatten()
        return total, indices, self._query_metadata(cad, rejected, total)

    def _slots(self, cad: CommonAttentionMetadata, owner: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cache slots of `positions` of the requests `owner`; the shapes broadcast."""
        pages = cad.block_table_tensor[owner, positions // self.block_size]
        return pages.long() * self.block_size + positions % self.block_size

    def _query_metadata(
        self, cad: CommonAttentionMetadata, rejected: torch.Tensor, total: int
    ) -> CommonAttentionMetadata:
        requests = cad.batch_size()
        upper = cad.seq_lens_cpu_upper_bound
        return CommonAttentionMetadata(
            query_start_loc=self.arange[: requests + 1] * self.queries,
            query_start_loc_cpu=torch.from_numpy(self.token_arange_np[: requests + 1] * self.queries),
            seq_lens=(cad.seq_lens - rejected + self.queries).to(cad.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if upper is None else upper + self.queries,
            num_reqs=cad.num_reqs,
            num_actual_tokens=total,
            max_query_len=self.queries,
            max_seq_len=cad.max_seq_len + self.queries,
            block_table_tensor=cad.block_table_tensor,
            slot_mapping=self._slot_mapping_buffer[:total],
            causal=self.dflash_causal,
        )

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, None]:
        """Choose the tokens left to right. `hidden_states` [requests * n, hidden] -> target ids [requests * n]."""
        model, wanted = self.model, self.num_speculative_tokens
        logits = model.compute_draft_logits(hidden_states)
        logits = logits.view(-1, wanted, logits.shape[-1])  # [requests, n, draft vocabulary]
        previous = self._anchors.long()
        tokens, embeddings = [], []
        for place in range(wanted):
            embedding = model.markov_embed(previous)
            biased = logits[:, place] + model.markov_bias(embedding)
            previous = model.map_draft_to_target(biased.argmax(dim=-1))
            tokens.append(previous)
            embeddings.append(embedding)
        if self.confidence_cut > 0.0:
            markov = torch.stack(embeddings, dim=1).flatten(0, 1)
            self._confidences = model.compute_confidence(hidden_states, markov).view(-1, wanted)
        return torch.stack(tokens, dim=1).flatten(), None

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Drafts of every request: [requests, n], or lists of 0 to n tokens each when a confidence cut is set."""
        drafts = super().propose(*args, **kwargs)
        if self.confidence_cut <= 0.0 or drafts.shape[1] == 0:
            return drafts
        assert self._confidences is not None
        return cut_drafts(drafts.tolist(), self._confidences.tolist(), self.confidence_cut)
