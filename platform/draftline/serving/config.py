"""What one Serve application serves, and the engine arguments that follow from it. Pure: no Ray, torch or vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from draftline.errors import InputError
from draftline.recipe.schema import Positive, Recipe, Section, Share
from draftline.targets.engine_args import base_engine_args, draft_engine_args

# Engine arguments that fields of ServeConfig or ray.serve.llm set themselves.
OWN_ENGINE_ARGS = frozenset(
    {
        "model",
        "served_model_name",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "tensor_parallel_size",
        "trust_remote_code",
        "speculative_config",
        "worker_cls",
        "worker_extension_cls",
        "additional_config",
        "distributed_executor_backend",
    }
)
HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")


class ServeConfig(Section):
    """One Serve application: a target, its draft, and how they are served."""

    model_name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9./_-]*$", description="name that clients ask for, such as a hub id"
    )
    target: str = Field(min_length=1, description="the target's folder (~ is the home folder), or a hub id")
    draft: str | None = Field(None, description="the draft's folder; none: the target alone")
    accelerator: Literal["cpu", "gpu"] = Field("cpu", description="where the engines run")
    draft_tokens: Positive | None = Field(None, description="tokens drafted a pass; none: all that a block drafts")
    confidence_cut: Literal["auto"] | Share = Field(
        "auto", description="drafts end where the product of confidences falls below this (CPU); 0: never"
    )
    draft_sampling: Literal["greedy", "probabilistic"] = Field("greedy", description="how draft tokens are drawn (GPU)")
    rejection_method: Literal["standard", "block"] = Field("standard", description="vLLM's rejection sampling (GPU)")
    speculative_args: dict[str, Any] = Field(
        default_factory=dict, description="further keys of vLLM's speculative_config, as vLLM names them"
    )
    replicas: Positive = Field(1, description="Serve replicas")
    threads: Positive = Field(2, description="CPU threads of one replica")
    cpus: float = Field(0.5, ge=0.0, description="logical CPUs that one replica asks Ray for")
    max_model_len: Positive = Field(2048, description="longest prompt and answer together, tokens")
    max_requests: Positive = Field(4, description="requests that one replica decodes at once")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("auto", description="the engine's compute type")
    tensor_parallel: Positive = Field(1, description="GPUs (or CPU ranks) per replica")
    trust_remote_code: bool = Field(False, description="let the target's own code run")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="further vLLM engine arguments")
    host: str = Field("127.0.0.1", description="address that the HTTP endpoint listens on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="HTTP port; 0: any free one")
    route_prefix: str = Field(default="/", pattern=r"^/", description="path under which the application answers")

    @model_validator(mode="after")
    def _engine_args_are_free(self) -> Self:
        taken = sorted(OWN_ENGINE_ARGS & self.engine_args.keys())
        if taken:
            raise ValueError(f"engine_args.{taken[0]} is set by this project; use the field that stands for it")
        per_batch = "num_speculative_tokens_per_batch_size"
        if per_batch in self.speculative_args and self.engine_args.get("data_parallel_size", 1) > 1:
            raise ValueError(f"speculative_args.{per_batch} is silently off in vLLM when data_parallel_size is above 1")
        if self.draft is None and (self.draft_tokens is not None or self.speculative_args):
            raise ValueError("draft_tokens and speculative_args need a draft")
        return self

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, *, target: Path | str, target_name: str, draft: Path | str | None
    ) -> ServeConfig:
        """The application of a run: its recipe, where the target lies, and the draft that was exported."""
        serving, source = recipe.serving, recipe.target
        return cls(
            model_name=serving.model_name or target_name,
            target=str(target),
            draft=None if draft is None else str(draft),
            accelerator=recipe.resources.accelerator,
            draft_tokens=None if draft is None else serving.draft_tokens or recipe.draft.max_draft_tokens,
            confidence_cut=serving.confidence_cut,
            draft_sampling=serving.draft_sampling,
            rejection_method=serving.rejection_method,
            replicas=serving.replicas,
            threads=serving.threads,
            cpus=recipe.resources.cpus_per_actor,
            max_model_len=serving.max_model_len,
            max_requests=serving.max_requests,
            dtype=source.dtype,
            tensor_parallel=source.tensor_parallel,
            trust_remote_code=source.trust_remote_code,
            engine_args=source.engine_args,
            host=serving.host,
            port=serving.port,
        )

    @property
    def application(self) -> str:
        """Name of the Serve application: one for each target."""
        return self.model_name.replace("/", "--")

    @property
    def url(self) -> str:
        """Where the OpenAI-compatible endpoint answers, without a trailing slash."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"


def parse_serve_config(values: Mapping[str, Any]) -> ServeConfig:
    """A config from a Serve file or from `serve run ... key=value`, where every value is a text.

    Raises InputError naming the first key that is wrong.
    """
    try:
        return ServeConfig.model_validate(dict(values), strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "serve config"
        raise InputError(f"serving: {key}: {first['msg']}; found {first['input']!r}") from error


def complete(config: ServeConfig) -> ServeConfig:
    """The config with whole paths and draft_tokens filled in, after target and draft were checked to fit each other.

    Reads both config.json files. What is neither a folder nor a path is taken for a target's hub id, and only the draft
    is checked. Raises InputError for a missing folder and for a draft that does not fit.
    """
    folder = Path(config.target).expanduser()
    on_hub = not folder.is_dir() and HUB_ID.match(config.target) is not None
    target = None if on_hub else _read_model_config(folder, "target")
    found: dict[str, Any] = {} if on_hub else {"target": str(folder.absolute())}
    if config.draft is not None:
        draft_folder = Path(config.draft).expanduser()
        draft = _read_model_config(draft_folder, "draft")
        tokens = config.draft_tokens or max_draft_tokens(draft)
        check_draft_fits(target, draft, tokens)
        found |= {"draft": str(draft_folder.absolute()), "draft_tokens": tokens}
    return config.model_copy(update=found)


def engine_kwargs(config: ServeConfig) -> dict[str, Any]:
    """vLLM's engine arguments for a completed config, without the model itself (ray.serve.llm names it)."""
    args = base_engine_args(
        config.target,
        accelerator=config.accelerator,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_requests=config.max_requests,
        tensor_parallel=config.tensor_parallel,
        trust_remote_code=config.trust_remote_code,
        extra=config.engine_args,
    )
    del args["model"]
    if config.draft is None:
        return args
    if config.draft_tokens is None:
        raise ValueError("complete() the config first: draft_tokens is unknown")
    drafting = draft_engine_args(
        config.draft,
        draft_tokens=config.draft_tokens,
        accelerator=config.accelerator,
        confidence_cut=config.confidence_cut,
        draft_sampling=config.draft_sampling,
        rejection_method=config.rejection_method,
    )
    drafting["speculative_config"] |= config.speculative_args
    return args | drafting


def max_draft_tokens(draft_config: Mapping[str, Any]) -> int:
    """Tokens that one pass of the draft yields: the whole block when it samples from the anchor, else one less."""
    return draft_config["block_size"] - (0 if _samples_from_anchor(draft_config) else 1)


def check_draft_fits(
    target_config: Mapping[str, Any] | None, draft_config: Mapping[str, Any], draft_tokens: int
) -> None:
    """Refuses a draft that vLLM would load and then serve wrongly. Arguments are the parsed config.json files.

    Raises InputError: not a DSpark draft, no `sample_from_anchor` (vLLM reads a missing field as False and acceptance
    collapses), more tokens than a block drafts, another hidden size or vocabulary than the target's.
    """
    kind = draft_config.get("speculators_model_type")
    if kind != "dspark":
        raise InputError(f"draft config.json: speculators_model_type is {kind!r}, allowed is 'dspark'")
    most = max_draft_tokens(draft_config)
    if not 1 <= draft_tokens <= most:
        raise InputError(
            f"draft_tokens is {draft_tokens}, allowed are 1 to {most}: the draft has block_size "
            f"{draft_config['block_size']} and sample_from_anchor {draft_config['sample_from_anchor']}"
        )
    if target_config is None:
        return
    target = target_config.get("text_config", target_config)
    layer = draft_config.get("transformer_layer_config", {})
    hidden = draft_config.get("target_hidden_size") or layer.get("hidden_size")
    for key, found in (("hidden_size", hidden), ("vocab_size", layer.get("vocab_size"))):
        if found != target.get(key):
            raise InputError(
                f"draft config.json: {key} is {found}, but the target's is {target.get(key)}: "
                "the draft was made for another target"
            )
    taps, layers = draft_config.get("aux_hidden_state_layer_ids") or [], target["num_hidden_layers"]
    if any(tap >= layers for tap in taps):
        raise InputError(
            f"draft config.json: aux_hidden_state_layer_ids is {taps}, but the target has layers 0 to {layers - 1}"
        )


def _samples_from_anchor(draft_config: Mapping[str, Any]) -> bool:
    value = draft_config.get("sample_from_anchor")
    if not isinstance(value, bool):
        raise InputError(
            f"draft config.json: sample_from_anchor is {value!r}, allowed are true and false; vLLM takes a missing "
            "field for false, and the draft's tokens would then be off by one"
        )
    return value


def _read_model_config(folder: Path, what: str) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"serving.{what}: no file {file.absolute()}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"serving.{what}: {file} is not JSON at line {error.lineno}: {error.msg}") from None
