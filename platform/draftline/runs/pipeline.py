"""One run, start to end: checks the input, then moves through the stages. It never touches a tensor."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftline.cluster.local import worker_environment
from draftline.cluster.memory import MemoryWatch
from draftline.hidden_states.store import quiet_environment
from draftline.recipe.checks import check_machine, check_recipe
from draftline.recipe.schema import Recipe, resolve_path
from draftline.runs.actors import RunActors, remote_task
from draftline.runs.attempts import EndedEarly, run_stage
from draftline.runs.context import RunContext
from draftline.runs.frame import PipelineOptions, RunFrame
from draftline.runs.policy import Action, Cause
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
from draftline.serving.app import Served, remove, unhealthy
from draftline.storage.artifacts import store_url
from draftline.storage.store import open_store
from draftline.storage.workspace import cache_folder
from draftline.targets.resolve import ResolvedTarget, resolve_target
from draftline.targets.tokens import find_mask_token

WATCH_S = 2.0


def run_pipeline(recipe: Recipe, recipe_file: Path, options: PipelineOptions) -> int:
    """Runs all stages that are not done yet. Returns 0; errors propagate. Ray must be reachable.

    Raises InputError for bad input before anything of the run is written.
    """
    import ray

    progress = Progress()
    store = open_store(store_url(recipe.store))
    prompts = read_prompts(recipe_file, recipe.data, recipe.seed)
    progress.say("looking at the target (a packaged one is unpacked once)")
    target = resolve_target(recipe_file, recipe.target, cache_folder())
    check_recipe(recipe, recipe_file, target)
    if recipe.resources.accelerator == "cpu":
        check_machine(recipe, recipe_file, target)
    store.check()
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
            RunFrame.open(store, recipe, progress) as frame,
            RunActors(recipe, target, frame.folder, progress) as actors,
        ):
            _run(RunContext(recipe, target, mask_token_id, prompts, token_ids, options, frame, actors), session)
    except EndedEarly as end:
        progress.say(str(end))
    finally:
        ray.shutdown()
    return 0


def _run(context: RunContext, session_dir: str) -> None:
    frame, options = context.frame, context.options
    with contextlib.ExitStack() as serving:
        with frame.running(), _memory_recorded(frame, session_dir):
            for name, body in {"prepare": prepare, "train": train, "export": export, "evaluate": evaluate}.items():
                run_stage(context, name, body)
                if options.until == name:
                    raise EndedEarly(f"ended after stage {name}, as asked; submit the run again to go on")
            context.actors.close()  # serving needs the memory, and nothing captures any more
            served = run_stage(context, "serve", serve, again=True)
            if options.serve != "leave":
                serving.callback(remove, served.name)
        frame.progress.time_table(frame.record.figures, attempts=len(frame.record.attempts))
        frame.progress.say(f"all figures: draftline report {context.recipe.run_id} --store {frame.workspace.store.url}")
        if options.serve == "wait":
            _wait(context, served)


@contextlib.contextmanager
def _memory_recorded(frame: RunFrame, session_dir: str) -> Iterator[None]:
    with MemoryWatch(session_dir) as watch:
        try:
            yield
        finally:
            before = int(frame.record.figures.get("memory.peak_bytes", 0))
            # Written with the run's end, which is next: a record that cannot be written would hide why the run ends.
            frame.record.figures["memory.peak_bytes"] = max(before, watch.peak_bytes)


def _wait(context: RunContext, served: Served) -> None:
    context.frame.progress.say(f"serving {served.name} at {served.url}/v1 until Ctrl-C")
    with contextlib.suppress(StopRequested):  # what the stop handlers raise; the run itself is done
        was = None
        while True:
            trouble = unhealthy(served.name)
            if trouble and not was:
                context.frame.note(Cause.SERVING, trouble, Action.RECOVER, "Ray Serve starts it again")
            elif was and not trouble:
                context.frame.progress.say(f"{served.name} answers again")
            was = trouble
            time.sleep(WATCH_S)


def _tokenized(recipe: Recipe, recipe_file: Path, target: ResolvedTarget, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of the prompts; refuses those that do not fit into a row with their answer."""
    import ray

    answer = recipe.data.answer
    file = resolve_path(recipe_file, "data.prompts", recipe.data.prompts)
    token_ids: list[list[int]] = ray.get(
        remote_task(tokenize, recipe, threads=1).remote(
            str(target.path),
            {f"{file}:{prompt.line}": conversation(prompt, answer) for prompt in prompts},
            answer.chat_template_args,
            recipe.target.trust_remote_code,
        )
    )
    check_prompt_lengths(
        file,
        prompts,
        [len(ids) for ids in token_ids],
        answer.max_tokens,
        recipe.training.row_tokens,
        target.max_model_len,
    )
    return token_ids
