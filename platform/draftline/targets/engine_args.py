"""The one place that talks to vLLM's arguments: what an engine is started with, for each of the uses a run makes of it.

Pure: nothing here imports vLLM, so the driver may call it. The functions return keyword arguments of vLLM's
`AsyncEngineArgs`, and the environment variables that must be set before vLLM is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Accelerator = Literal["cpu", "gpu"]

CPU_KV_CACHE_BYTES = 1 << 30
CONNECTOR = ("HiddenStatesConnector", "draftline.hidden_states.connector")
CPU_CAPTURE_WORKER = "draftline.vllm_plugin.capture_worker.CaptureCPUWorker"
WORKER_EXTENSION = "draftline.vllm_plugin.extension.WorkerExtension"
CPU_DRAFT_WORKER = "draftline.vllm_plugin.worker.DSparkCPUWorker"


def engine_environment(accelerator: Accelerator, threads: int, *, batch_invariant: bool = False) -> dict[str, str]:
    """Environment of a process that holds an engine. It must be there before the process starts.

    `batch_invariant`: on a GPU, kernels whose results do not depend on what else is in the batch. vLLM has none for
    CPUs; there, one request at a time does the same.
    """
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if accelerator == "gpu":
        return environment | ({"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {})
    environment |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP threads sleep instead of spinning: on two cores they would take the trainer's time.
        "KMP_BLOCKTIME": "1",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # comes with vllm-cpu; faster loading, and vLLM's speculative decoding on CPU wants it
        environment["LD_PRELOAD"] = str(openmp)
    return environment


@functools.cache
def engine_arg_names() -> frozenset[str]:
    """The names that `AsyncEngineArgs` takes, from vLLM's source: importing it would take the driver many seconds.

    Empty where vLLM is not installed, or keeps them elsewhere.
    """
    vllm = importlib.util.find_spec("vllm")
    file = Path(str(vllm.origin)).parent / "engine" / "arg_utils.py" if vllm is not None else None
    if file is None or not file.is_file():
        return frozenset()
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        field.target.id
        for each in classes
        if each.name in ("EngineArgs", "AsyncEngineArgs")
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def base_engine_args(
    model: Path | str,
    *,
    accelerator: Accelerator,
    dtype: str,
    max_model_len: int,
    max_requests: int,
    tensor_parallel: int = 1,
    trust_remote_code: bool = False,
    seed: int = 0,
    kv_cache_bytes: int = CPU_KV_CACHE_BYTES,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments that every engine shares.

    `max_model_len` in tokens, `max_requests` decoded at once, `kv_cache_bytes` on a CPU (a GPU takes what is free).
    """
    args: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_requests,
        "tensor_parallel_size": tensor_parallel,
        "trust_remote_code": trust_remote_code,
        "seed": seed,
        "enable_log_requests": False,
    }
    if accelerator == "cpu":
        # float32 is several times faster than bfloat16 where the CPU lacks native bfloat16.
        args |= {
            "dtype": "float32" if dtype == "auto" else dtype,
            "enforce_eager": True,
            "kv_cache_memory_bytes": kv_cache_bytes,
        }
    return args | dict(extra or {})


def capture_engine_args(
    tap_layers: Sequence[int], target_layers: int, store: Mapping[str, Any], *, accelerator: Accelerator
) -> dict[str, Any]:
    """Arguments that make a target replica emit hidden states of the tap layers and of its last layer into Mooncake.

    `store` is the configuration of hs-connectors' `MooncakeStoreConfig`.
    """
    name, module = CONNECTOR
    return {
        # A cached prefix would not be computed again, and its hidden states would be missing.
        "enable_prefix_caching": False,
        **({"worker_cls": CPU_CAPTURE_WORKER} if accelerator == "cpu" else {"worker_extension_cls": WORKER_EXTENSION}),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": [*tap_layers, target_layers]},
            },
        },
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_role": "kv_producer",
            "kv_connector_module_path": module,
            "kv_connector_extra_config": {"mooncake": dict(store)},
        },
    }


def draft_engine_args(
    draft: Path | str,
    *,
    draft_tokens: int,
    accelerator: Accelerator,
    confidence_cut: float | Literal["auto"] = 0.0,
    draft_sampling: str = "greedy",
    rejection_method: str = "standard",
) -> dict[str, Any]:
    """Arguments that make an engine decode with a DSpark draft.

    On a GPU this is vLLM's own DSpark; on a CPU it is the project's plugin, which cuts drafts at `confidence_cut`.
    """
    speculative: dict[str, Any] = {"method": "dspark", "model": str(draft), "num_speculative_tokens": draft_tokens}
    if accelerator == "gpu":
        speculative |= {"draft_sample_method": draft_sampling, "rejection_sample_method": rejection_method}
        return {"speculative_config": speculative}
    return {
        "speculative_config": speculative,
        "worker_cls": CPU_DRAFT_WORKER,
        "additional_config": {"draftline": {"confidence_cut": confidence_cut}},
        # Drafts whose length differs from request to request need the scheduler to wait for them.
        "async_scheduling": False,
    }
