"""`make chaos`: carries out the scenarios of some seeds, one run after the other, and prints what became of them."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from chaos.bench import Bench
from chaos.harness import Outcome
from chaos.plan import parse_seeds, scenario


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all that must hold did; 1 otherwise; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="chaos", description="Kills parts of real runs and compares the weights.")
    parser.add_argument("--seeds", default="0-19", help="such as 0-19 or 3,7; any 20 in a row cover everything")
    parser.add_argument("--folder", type=Path, help="where to work; kept. None: a temporary one, kept after a failure")
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    options = parser.parse_args(arguments)
    try:
        scenarios = [scenario(seed) for seed in parse_seeds(options.seeds)]
    except ValueError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    if options.plan:
        for plan in scenarios:
            print(f"seed {plan.seed:>3}  {plan}")
        return 0
    if options.folder:
        options.folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended on the way out
    bench = Bench(options.folder or Path(tempfile.mkdtemp(prefix="draftline-chaos-")))
    references = bench.make_references(scenarios)
    for outcome in references:
        print(outcome.line(), flush=True)
    if not all(outcome.good for outcome in references):
        print(f"no undisturbed run to compare with; all files: {bench.folder}")
        return 1
    outcomes = []
    for plan in scenarios:
        outcomes.append(bench.disturb(plan))
        print(outcomes[-1].line(), flush=True)
        if outcomes[-1].good and not options.folder:
            bench.forget(outcomes[-1])
    print("\n" + summary(outcomes))
    good = all(outcome.good for outcome in outcomes)
    if good and not options.folder:
        shutil.rmtree(bench.folder)
    else:
        print(f"files: {bench.folder}")
    return 0 if good else 1


def summary(outcomes: Sequence[Outcome]) -> str:
    """A table, and the line that says it all."""
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    lines = [f"{'seed':>4}  {'what':<74}{'runs':>5}{'total':>8}{'standstill':>12}{'engine':>8}  verdict"]
    for outcome in outcomes:
        verdict = "skipped" if outcome.skipped else "ok" if outcome.good else "FAILED"
        times = [_seconds(each) for each in (outcome.seconds, outcome.standstill_s, outcome.engine_start_s)]
        what = f"{outcome.scenario.seed:>4}  {outcome.scenario!s:<74}{outcome.submissions:>5}"
        lines.append(f"{what}{times[0]:>8}{times[1]:>12}{times[2]:>8}  {verdict}")
    same = sum(bool(outcome.weights) and not outcome.other_weights for outcome in tried)
    lines.append(
        f"\n{same} of {len(tried)} bit-identical, {sum(o.lost for o in tried)} lost, "
        f"{sum(o.repeated for o in tried)} repeated, {sum(o.hung for o in tried)} hangs, "
        f"{sum(not o.good for o in tried)} failed, {len(outcomes) - len(tried)} skipped"
    )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
