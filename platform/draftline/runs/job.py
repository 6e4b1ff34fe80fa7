"""The driver of one run: reads its command line, runs the pipeline, and turns errors into exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from draftline.errors import InputError, RunFailed
from draftline.recipe.load import load_recipe
from draftline.runs.frame import PipelineOptions
from draftline.runs.states import STAGES
from draftline.runs.stopping import install_stop_handlers, stop_behind

FAILED_STATUS = 1
BAD_INPUT_STATUS = 2
STOPPED_STATUS = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a recipe; returns 0, 1 (a stage failed its check), 2 (bad input) or 130 (stopped)."""
    parser = argparse.ArgumentParser(prog="jobs/pipeline.py", description="Runs all stages of a recipe on Ray.")
    parser.add_argument("recipe", type=Path, help="recipe file, YAML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as seed=1")
    parser.add_argument(
        "--serve",
        choices=("wait", "leave", "end"),
        default="leave",
        help="at the end: wait until stopped, leave the application up (default), or end it",
    )
    parser.add_argument("--until", choices=STAGES, help="end the run after this stage; it can be resumed")
    options = parser.parse_args(arguments)
    install_stop_handlers()
    try:
        recipe = load_recipe(options.recipe, options.set)
        from draftline.runs.pipeline import run_pipeline

        return run_pipeline(recipe, options.recipe, PipelineOptions(serve=options.serve, until=options.until))
    # An error that crossed from an actor or a task carries its traceback in its text, and itself as the cause.
    except InputError as error:
        print(f"draftline: {getattr(error, 'cause', None) or error}", file=sys.stderr, flush=True)
        return BAD_INPUT_STATUS
    except RunFailed as error:
        print(f"draftline: the run failed: {getattr(error, 'cause', None) or error}", file=sys.stderr, flush=True)
        return FAILED_STATUS
    except BaseException as error:
        if stop := stop_behind(error):
            print(f"draftline: stopped ({stop})", file=sys.stderr, flush=True)
            return STOPPED_STATUS
        raise
