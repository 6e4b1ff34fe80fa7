"""What a run is: every field of a recipe, with its meaning and unit beside it.

The models are strict: an unknown key is refused and a string is not a number. `load.py` reads a recipe from YAML and
turns a refusal into one message that names file, line and key; `table.py` renders the field table of the README.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from draftline.storage.files import user_path

# What the tokenizer takes beside the template's arguments, and what it hands to the template itself.
_OWN_TEMPLATE_ARGS = frozenset(
    [
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    ]
)
RUN_ID = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


def _byte_count(value: Any) -> Any:
    """Bytes as an integer, or a text with a unit ("512MiB"). A float or a bare text is refused: its unit is unclear."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a number of bytes with its unit is wanted, such as 512MiB or 2GiB")
    if isinstance(value, str):
        return ByteSize._validate(value, None)  # type: ignore[arg-type]
    return value


Bytes = Annotated[int, BeforeValidator(_byte_count), Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Budget = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Target(Section):
    """The model whose decoding is sped up. Exactly one of `package`, `path` and `hub` names it."""

    package: str | None = Field(None, description="Python package that carries the weights as GGUF, `name==version`")
    path: str | None = Field(None, description="local folder in Hugging Face format; relative to the recipe's folder")
    hub: str | None = Field(None, description="hub id, `owner/name`")
    revision: str | None = Field(None, description="hub revision; only with `hub`")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("auto", description="the engine's compute type")
    trust_remote_code: bool = Field(False, description="let the target's own code run; off unless said here")
    tensor_parallel: Positive = Field(1, description="GPUs (or CPU ranks) per replica")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="further vLLM engine arguments, as vLLM names them"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Target:
        given = [name for name in ("package", "path", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"name the target by exactly one of package, path, hub; found {', '.join(given) or 'none'}"
            )
        if self.revision is not None and self.hub is None:
            raise ValueError("revision goes with hub only")
        return self


class Answer(Section):
    """How the target answers the prompts that the draft learns from (on-policy data)."""

    max_tokens: Positive = Field(512, description="longest answer, tokens")
    temperature: float = Field(0.0, ge=0.0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus sampling")
    system_prompt: str | None = Field(None, description="system message put before every prompt")
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments for the chat template, such as `enable_thinking: false`"
    )

    @model_validator(mode="after")
    def _template_args_are_free(self) -> Answer:
        taken = sorted(_OWN_TEMPLATE_ARGS & self.chat_template_args.keys())
        if taken:
            raise ValueError(f"chat_template_args cannot hold {', '.join(taken)}: the pipeline sets that itself")
        return self


class Data(Section):
    """The prompts."""

    prompts: str = Field(description="JSONL file of prompts or conversations; relative to the recipe's folder")
    field: str | None = Field(
        None,
        description="field that holds the prompt; none: `prompt`, `question`, `turns`, `messages` or `conversations`",
    )
    max_prompts: Positive | None = Field(
        None, description="use only so many prompts (spread over the domains); none: all"
    )
    held_out_share: float = Field(0.1, gt=0.0, lt=1.0, description="share of each domain's prompts never trained on")
    answer: Answer = Field(default_factory=Answer)


class Draft(Section):
    """The DSpark draft's shape."""

    layers: Positive = Field(2, description="decoder layers of the draft")
    tap_layers: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=1, description="target layers that feed the draft, increasing; i = the residual stream after layer i"
    )
    block_size: Annotated[int, Field(ge=2, le=64)] = Field(8, description="positions of one draft block")
    block_layout: Literal["anchor_first", "one_plus_n"] = Field(
        "anchor_first", description="anchor_first drafts block_size tokens a pass, one_plus_n block_size - 1"
    )
    vocab_size: Positive | None = Field(
        None,
        description="reduced draft vocabulary from the data's own token counts; none: the target's whole vocabulary",
    )
    mask_token_id: Annotated[int, Field(ge=0)] | None = Field(
        None, description="token id of masked positions; none: a token that the target's tokenizer keeps unused"
    )
    markov_rank: Positive = Field(64, description="rank of the Markov logit-bias head")
    heads: Positive | None = Field(None, description="attention heads; none: the target's")
    kv_heads: Positive | None = Field(None, description="key/value heads; none: the target's")
    head_dim: Positive | None = Field(None, description="size of one head; none: the target's")
    ffn_size: Positive | None = Field(None, description="feed-forward width; none: the target's")
    sliding_window: Positive | None = Field(
        None, description="attention window of the draft's layers, tokens; none: full"
    )

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that one pass drafts."""
        return self.block_size if self.block_layout == "anchor_first" else self.block_size - 1

    @model_validator(mode="after")
    def _taps_increase(self) -> Draft:
        if any(b <= a for a, b in zip(self.tap_layers, self.tap_layers[1:], strict=False)):
            raise ValueError(f"tap_layers must increase, found {self.tap_layers}")
        return self


class HiddenStates(Section):
    """How hidden states travel from the target replicas to the train workers."""

    replicas: Positive = Field(1, description="target replicas (vLLM engines)")
    threads: Positive = Field(1, description="CPU threads of one replica while extraction and training overlap")
    concurrency: Positive = Field(4, description="samples that one replica captures at once")
    window_bytes: Bytes = Field(512 << 20, description="most bytes extracted ahead of training")
    segment_bytes: Bytes = Field(1 << 30, description="store memory that one replica offers")
    buffer_bytes: Bytes = Field(256 << 20, description="transfer buffer of one store client")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="Mooncake's transport")
    rdma_devices: str = Field("", description="RDMA device names, comma separated; empty: Mooncake chooses")
    attempts: Positive = Field(3, description="tries at one sample before it is skipped and counted")
    max_skipped_share: Share = Field(0.01, description="share of samples that may be skipped before the run fails")


class Extraction(Section):
    """How the target computes answers and hidden states."""

    deterministic: bool = Field(
        False,
        description="one sample per forward pass (GPU: batch-invariant kernels): the same recipe gives the same "
        "weights bit for bit, whatever was killed on the way; slower",
    )


class Optimizer(Section):
    """Optimiser and schedule."""

    name: Literal["adamw", "muon"] = Field("adamw", description="muon: matrices by Muon, the rest by AdamW")
    lr: float = Field(1.5e-3, gt=0.0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled weight decay")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False, description="AdamW's moment decay rates")
    momentum: float = Field(0.95, ge=0.0, lt=1.0, description="Muon's momentum")
    warmup_share: Share = Field(0.05, description="share of the steps that the learning rate rises over")
    decay: Literal["linear", "cosine", "constant"] = Field("linear", description="shape after the warm-up")
    min_lr_share: Share = Field(0.05, description="last learning rate as a share of the peak")
    clip_norm: float = Field(1.0, gt=0.0, description="gradient norm is clipped to this")


class Loss(Section):
    """The DSpark paper's loss: 0.1 cross-entropy + 0.9 total variation + confidence BCE, decaying along the block."""

    ce: float = Field(0.1, ge=0.0, description="weight of cross-entropy")
    tv: float = Field(0.9, ge=0.0, description="weight of total variation")
    confidence: float = Field(1.0, ge=0.0, description="weight of the confidence head's binary cross-entropy")
    decay_gamma: float = Field(4.0, gt=0.0, description="position k of a block weighs exp(-k/gamma)")


class Training(Section):
    """The train loop."""

    workers: Positive = Field(1, description="Ray Train workers")
    threads: Positive = Field(1, description="CPU threads of one worker")
    epochs: Positive = Field(1, description="passes over the samples")
    row_tokens: Annotated[int, Field(ge=16)] = Field(1024, description="tokens of one packed row")
    max_anchors: Positive = Field(
        256, description="block anchors drawn per row; fewer than its answer tokens covers a part"
    )
    prefetch_rows: Positive = Field(2, description="rows that one worker reads ahead")
    evaluate_every_steps: Positive = Field(50, description="steps between held-out evaluations")
    checkpoint_every_steps: Positive = Field(100, description="steps between checkpoints")
    optimizer: Optimizer = Field(default_factory=Optimizer)
    loss: Loss = Field(default_factory=Loss)


class Evaluation(Section):
    """What is measured in vLLM with the draft."""

    prompts_per_domain: Positive = Field(2, description="held-out prompts of each domain")
    max_tokens: Positive = Field(128, description="longest answer, tokens")
    estimate_tolerance: Share = Field(0.02, description="allowed relative gap between served and estimated acceptance")


class Serving(Section):
    """The Ray Serve application."""

    host: str = Field("127.0.0.1", description="address that the HTTP endpoint listens on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="HTTP port")
    model_name: str | None = Field(None, description="name clients ask for; none: the target's name")
    replicas: Positive = Field(1, description="Serve replicas")
    threads: Positive = Field(2, description="CPU threads of one replica")
    max_model_len: Positive = Field(2048, description="longest prompt and answer together, tokens")
    max_requests: Positive = Field(4, description="requests that one replica decodes at once")
    draft_tokens: Positive | None = Field(None, description="tokens drafted a pass; none: all that a block drafts")
    confidence_cut: Literal["auto"] | Share = Field(
        "auto",
        description="drafts end where the product of confidences falls below this; 0: never; auto: measured at start",
    )
    draft_sampling: Literal["greedy", "probabilistic"] = Field("greedy", description="how draft tokens are drawn (GPU)")
    rejection_method: Literal["standard", "block"] = Field("standard", description="vLLM's rejection sampling (GPU)")


class Failures(Section):
    """How many failures of each kind a run recovers from by itself before it fails."""

    replicas: Budget = Field(5, description="target replicas lost and started again")
    masters: Budget = Field(5, description="Mooncake masters lost and started again")
    workers: Budget = Field(3, description="train workers lost and started again from the last checkpoint")
    feeders: Budget = Field(3, description="feeders lost and started again, with the train workers")
    engines: Budget = Field(3, description="other engines and tasks lost; their stage is tried again")
    storage: Budget = Field(3, description="refusals of the artifact store or a full disk; the stage is tried again")
    forget_after_s: float = Field(3600.0, gt=0.0, description="failures older than this count no more, seconds")
    pause_s: float = Field(
        1.0,
        ge=0.0,
        description="pause before a recovery, seconds; doubles from one to the next, up to 5 (of storage: five times "
        "that, up to 60)",
    )
    grace_s: float = Field(20.0, ge=0.0, description="longest wait for a last checkpoint when asked to stop, seconds")


class Resources(Section):
    """What the run takes of the machine or cluster."""

    accelerator: Literal["cpu", "gpu"] = Field("cpu", description="where engines and training run")
    memory_limit_bytes: Bytes | None = Field(
        None, description="most memory of all the run's processes; none: not checked"
    )
    cpus_per_actor: float = Field(0.5, ge=0.0, description="logical CPUs that an engine or a worker asks Ray for")


class Recipe(Section):
    """Everything about a run."""

    run_id: str = Field(pattern=RUN_ID, description="the run's name; the same name resumes it")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(0, description="seed of every random choice")
    store: str = Field(
        "runs", description="where all artifacts go: a folder, relative to the working directory, or s3://bucket/prefix"
    )
    target: Target
    data: Data
    draft: Draft
    extraction: Extraction = Field(default_factory=Extraction)
    hidden_states: HiddenStates = Field(default_factory=HiddenStates)
    training: Training = Field(default_factory=Training)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    serving: Serving = Field(default_factory=Serving)
    failures: Failures = Field(default_factory=Failures)
    resources: Resources = Field(default_factory=Resources)

    @model_validator(mode="after")
    def _parts_agree(self) -> Recipe:
        most = self.draft.max_draft_tokens
        if self.serving.draft_tokens is not None and self.serving.draft_tokens > most:
            raise ValueError(
                f"serving.draft_tokens is {self.serving.draft_tokens}, but draft.block_size {self.draft.block_size} "
                f"({self.draft.block_layout}) drafts at most {most} tokens"
            )
        if self.data.answer.max_tokens >= self.training.row_tokens:
            raise ValueError(
                f"data.answer.max_tokens is {self.data.answer.max_tokens}, but an answer must fit into a row with its "
                f"prompt: training.row_tokens is {self.training.row_tokens}"
            )
        return self


def resolve_path(recipe_file: Path, key: str, value: str) -> Path:
    """The path at the recipe's `key`, relative to the recipe's own folder unless absolute. Raises InputError."""
    path = user_path(recipe_file.parent, value, f"{recipe_file}: {key}")
    return path if Path(value).expanduser().is_absolute() else path.resolve()
