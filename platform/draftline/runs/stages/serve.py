"""serve: the Ray Serve application comes up with target and draft, and answers a request over HTTP."""

from __future__ import annotations

from draftline.runs.context import RunContext
from draftline.runs.frame import Stage
from draftline.runs.policy import Action, Cause
from draftline.serving.app import Served, deploy
from draftline.serving.config import ServeConfig
from draftline.serving.probe import ask, curl_line

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
ANSWER_TOKENS = 48


def serve(context: RunContext, stage: Stage) -> Served:
    """Deploys, asks, and prints the curl line; the application is up afterwards."""
    progress = context.frame.progress
    config = ServeConfig.from_recipe(
        context.recipe,
        target=context.target.path,
        target_name=context.target.name,
        draft=context.frame.folder.draft.resolve(),
    )

    def lost(what: str) -> None:
        context.frame.note(Cause.SERVING, what, Action.RECOVER, "Ray Serve starts it again")

    with progress.waiting("the Serve application to start"):
        served = deploy(config, progress=progress.say, lost=lost)
    answer = ask(served.url, config.model_name, QUESTION, max_tokens=ANSWER_TOKENS)
    progress.say(f"asked over HTTP: {QUESTION}")
    progress.say(f"answered: {answer.strip()}")
    progress.say(f"ask yourself: {curl_line(served.url, config.model_name, QUESTION)}")
    context.frame.figures({"serve.http_ok": True, "serve.url": served.url})
    return served
