"""The `draftline` command."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftline import __version__
from draftline.errors import InputError, RunFailed
from draftline.recipe.load import dump_recipe, load_recipe
from draftline.recipe.schema import Recipe
from draftline.runs.listing import report_text, runs_text
from draftline.runs.record import require_record
from draftline.runs.states import STAGES, RunState
from draftline.runs.stopping import StopRequested, install_stop_handlers
from draftline.samples.prompts import read_prompts
from draftline.storage.artifacts import store_url
from draftline.storage.store import ArtifactStore, StoreFailed, open_store

FAILED_STATUS = 1
BAD_INPUT_STATUS = 2
STOPPED_STATUS = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 2 for bad input, 1 for a failure, otherwise the command's own."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except InputError as error:
        print(f"draftline: {error}", file=sys.stderr)
        return BAD_INPUT_STATUS
    except RunFailed as error:
        print(f"draftline: {error}", file=sys.stderr)
        return FAILED_STATUS
    except (KeyboardInterrupt, StopRequested):
        print("draftline: stopped", file=sys.stderr)
        return STOPPED_STATUS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="draftline", description="Trains, proves and serves DSpark drafts.")
    parser.add_argument("--version", action="version", version=f"draftline {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a recipe: starts or joins Ray, submits the job, shows its progress")
    _recipe_arguments(run)
    run.add_argument("--no-wait", action="store_true", help="end when the run is done instead of serving until Ctrl-C")
    run.add_argument("--until", choices=STAGES, help="end the run after this stage; the same command resumes it")
    run.add_argument("--address", help="Ray cluster to join, as `host:port` or `http://host:port`; none: RAY_ADDRESS, "
                     "a cluster that `ray start` left here, or a new one")  # fmt: skip
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help="show a run's figures")
    report.add_argument("run", help="run_id")
    report.add_argument("--json", action="store_true", help="as one JSON object")
    _store_argument(report)
    report.set_defaults(command=_report)

    runs = commands.add_parser("runs", help="list the runs of a store")
    _store_argument(runs)
    runs.set_defaults(command=_runs)

    recipe = commands.add_parser("recipe", help="check a recipe and its prompts; print every field of it")
    _recipe_arguments(recipe)
    recipe.set_defaults(command=_recipe)
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="recipe file, YAML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as seed=1")


def _store_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", default="runs", help="artifact store: a folder or s3://bucket/prefix (default: runs)"
    )


def _run(options: argparse.Namespace) -> int:
    # Bad input is refused before anything starts; a cluster elsewhere may have prompts that this machine lacks.
    recipe = load_recipe(options.recipe, options.set)
    open_store(store_url(recipe.store))
    from draftline.cluster.jobs import PipelineJob
    from draftline.cluster.local import on_this_machine, ray_cluster, running_cluster

    address = running_cluster(options.address)
    if address is None or on_this_machine(address) is not None:
        read_prompts(options.recipe, recipe.data, recipe.seed)
    install_stop_handlers()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    serve = "wait" if terminal and not options.no_wait else "end"
    with ray_cluster(address or "local") as cluster:
        status = PipelineJob(cluster, options.recipe, options.set, serve, options.until).follow(sys.stdout)
        if status == STOPPED_STATUS and serve == "wait" and cluster.local and _is_done(recipe):
            return 0  # Ctrl-C is how serving ends
        return status


def _is_done(recipe: Recipe) -> bool:
    return require_record(open_store(store_url(recipe.store)), recipe.run_id).state is RunState.DONE


def _report(options: argparse.Namespace) -> int:
    with _store_to_read(options.store) as store:
        record = require_record(store, options.run)
    print(json.dumps(record.report(), indent=2, ensure_ascii=False) if options.json else report_text(record))
    return 0


def _runs(options: argparse.Namespace) -> int:
    with _store_to_read(options.store) as store:
        print(runs_text(store))
    return 0


@contextlib.contextmanager
def _store_to_read(url: str) -> Iterator[ArtifactStore]:
    """The store of `--store`; one that fails while it is read is bad input."""
    try:
        yield open_store(store_url(url), hasty=True)
    except StoreFailed as error:
        raise InputError(f"--store: {error}") from error


def _recipe(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe, options.set)
    read_prompts(options.recipe, recipe.data, recipe.seed)
    print(dump_recipe(recipe), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
