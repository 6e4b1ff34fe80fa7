"""A target small enough to start in seconds, and DSpark drafts for it: real models with random weights.

The target is a Llama with a byte-level tokenizer and a chat template. It only ever says printable ASCII, now and then
ends its answer by itself, and its greedy answers differ from prompt to prompt. Same arguments, same files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from speculators.models.dspark import DSparkDraftModel
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

BlockLayout = Literal["anchor_first", "one_plus_n"]

END = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END, *(f"<|reserved_{i}|>" for i in range(5))]
UNUSED_TOKEN = len(SPECIAL_TOKENS) - 1  # id of <|reserved_4|>: the special tokens come first
TAP_LAYERS = (0, 1)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_target(folder: Path, *, layers: int = 2, hidden: int = 64, vocab: int = 272, seed: int = 0) -> Path:
    """Write a random Llama with tokenizer and chat template into `folder`, in Hugging Face format; returns `folder`.

    `vocab` must hold the 256 bytes and the special tokens; rows beyond them belong to no token.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,  # the smallest that vLLM's CPU attention knows
        max_position_embeddings=2048,
        # Weights of the default scale (0.02) would leave attention flat: every answer would run into a short cycle.
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    spoken = [end, *(tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127))]
    silent = torch.ones(vocab, dtype=torch.bool)
    silent[spoken] = False
    with torch.no_grad():
        model.lm_head.weight[silent] = 0.0
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_tiny_draft(
    target: Path,
    folder: Path,
    *,
    block_size: int = 4,
    block_layout: BlockLayout = "anchor_first",
    draft_vocab: int | None = None,
    layers: int = 1,
    tap_layers: tuple[int, ...] = TAP_LAYERS,
    seed: int = 0,
    memorise: Sequence[Sequence[int]] = (),
    steps: int = 60,
) -> Path:
    """Write a DSpark draft for `target` into `folder`, in speculators' format; returns `folder`.

    `draft_vocab` takes that many of the target's tokens, the printable ones first; None: its whole vocabulary.
    Weights are drawn wide enough that drafts depend on context, block position and the token before. `memorise` holds
    token ids (prompt and answer) that the draft is trained on for `steps` steps, so that it is right about them often.
    """
    import torch
    from speculators.models.dspark import DSparkDraftModel
    from transformers import AutoConfig, Qwen3Config

    target_config = AutoConfig.from_pretrained(target)
    decoder = Qwen3Config(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target_config.num_attention_heads,
        num_key_value_heads=target_config.num_key_value_heads,
        head_dim=target_config.head_dim,
        max_position_embeddings=target_config.max_position_embeddings,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    kept = torch.arange(target_config.vocab_size)
    if draft_vocab is not None:
        kept = _printable_first(target_config.vocab_size)[:draft_vocab].sort().values
    t2d = torch.zeros(target_config.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    torch.manual_seed(seed)
    draft = DSparkDraftModel.from_training_args(
        decoder,
        t2d if draft_vocab is not None else None,
        kept - torch.arange(len(kept)) if draft_vocab is not None else None,
        verifier_name_or_path=str(target),
        draft_vocab_size=len(kept),
        block_size=block_size,
        sample_from_anchor=block_layout == "anchor_first",
        target_layer_ids=list(tap_layers),
        mask_token_id=UNUSED_TOKEN,
        markov_rank=8,
        draft_attn_impl="eager",
    ).float()
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.requires_grad and weight.dim() == 2 and "lm_head" not in name and "embed_tokens" not in name:
                weight.normal_(0.0, 0.2)
    if memorise:
        _memorise(draft, target, memorise, steps)
    draft.save_pretrained(folder)
    return folder


def target_states(
    target: Path, sequences: Sequence[Sequence[int]], tap_layers: tuple[int, ...] = TAP_LAYERS
) -> list[tuple[Tensor, Tensor]]:
    """What the target computes for each sequence, by transformers: (taps [T, taps * H], last layer [T, H])."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    last: list[Tensor] = []
    # The last entry of `hidden_states` has been through the final norm; drafts learn from the layer's own output.
    model.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: last.append(output))
    states = []
    with torch.no_grad():
        for sequence in sequences:
            layers = model.model(torch.tensor([list(sequence)]), output_hidden_states=True).hidden_states
            states.append((torch.cat([layers[tap][0] for tap in tap_layers], dim=-1), last.pop()[0]))
    return states


def _memorise(draft: DSparkDraftModel, target: Path, sequences: Sequence[Sequence[int]], steps: int) -> None:
    import torch
    from speculators.losses import resolve_loss_config

    states = target_states(target, sequences, tuple(draft.target_layer_ids))
    lengths = [len(sequence) for sequence in sequences]
    row = {
        "input_ids": torch.tensor([[token for sequence in sequences for token in sequence]]),
        "hidden_states": torch.cat([taps for taps, _ in states])[None],
        "verifier_last_hidden_states": torch.cat([last for _, last in states])[None],
        "loss_mask": torch.ones(1, sum(lengths), dtype=torch.bool),
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    loss_config, tv = resolve_loss_config('{"ce": 0.9, "tv": 0.1}', "eager"), resolve_loss_config("tv", "eager")
    optimizer = torch.optim.AdamW([weight for weight in draft.parameters() if weight.requires_grad], lr=5e-3)
    for _ in range(steps):
        _, loss, _ = draft(**row, loss_config=loss_config, tv_loss_fn=tv["tv"][0], max_anchors=96)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=SPECIAL_TOKENS[0])
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _printable_first(vocab: int) -> Tensor:
    import torch

    tokenizer = _byte_tokenizer()
    printable = [tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127)]
    first = set(printable)
    return torch.tensor(printable + [token for token in range(vocab) if token not in first])
