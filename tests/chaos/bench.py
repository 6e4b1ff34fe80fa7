"""Where the runs of the chaos suite happen: one target, one folder per run, and undisturbed runs to compare with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from chaos.harness import Experiment, Outcome, Reference
from chaos.plan import Scenario, Shape, undisturbed
from draftline.runs.states import STAGES
from leftovers import adopt_orphans
from tiny import build_tiny_target

RECIPE = """
run_id: chaos
target: {{path: {target}}}
data:
  prompts: prompts.jsonl
  held_out_share: 0.2
  answer: {{max_tokens: 24}}
draft: {{layers: 1, tap_layers: [0, 1], block_size: 4, vocab_size: 128, markov_rank: 8}}
extraction: {{deterministic: true}}
hidden_states: {{replicas: {replicas}, window_bytes: 512KiB, segment_bytes: 16MiB, buffer_bytes: 16MiB}}
training:
  workers: {workers}
  epochs: {epochs}
  row_tokens: 128
  evaluate_every_steps: 100
  checkpoint_every_steps: 20
  optimizer: {{warmup_share: 0.05}}
evaluation: {{prompts_per_domain: 2, max_tokens: 24}}
serving: {{port: 0, max_model_len: 256, confidence_cut: 0.1}}
"""
# When a submission hangs: after this time, or after so many times what an undisturbed run took, and so much more.
LIMIT_S = 400.0
PATIENCE, PATIENCE_S = 1.5, 120.0


class Bench:
    """A working folder. Processes that lose their parent become this process's own: none can get away."""

    def __init__(self, folder: Path) -> None:
        adopt_orphans()
        self.folder = folder
        self._target = build_tiny_target(folder / "target")
        self._references: dict[int, tuple[Reference, float]] = {}

    def make_references(self, scenarios: Iterable[Scenario]) -> list[Outcome]:
        """Makes the undisturbed runs that the scenarios are compared with: one for each number of train workers.

        Each goes as far as the furthest of its scenarios. The number of replicas makes no difference to the weights, so
        a run that has two is compared with one that had one.
        """
        furthest: dict[int, int] = {}
        for scenario in scenarios:
            last = STAGES.index(scenario.shape.until) if scenario.shape.until else len(STAGES)
            furthest[scenario.shape.workers] = max(last, furthest.get(scenario.shape.workers, 0))
        return [
            self._reference(Shape(workers=workers, until=STAGES[last] if last < len(STAGES) else None))
            for workers, last in sorted(furthest.items())
        ]

    def disturb(self, scenario: Scenario) -> Outcome:
        """Carries out a scenario, compared with its reference if that has been made."""
        reference, limit_s = self._references.get(scenario.shape.workers, (None, LIMIT_S))
        folder = self._run_folder(f"seed-{scenario.seed}", scenario.shape)
        return Experiment(folder, scenario, reference, limit_s).carry_out()

    def forget(self, outcome: Outcome) -> None:
        """Removes a run's folder."""
        shutil.rmtree(outcome.folder)

    def _reference(self, shape: Shape) -> Outcome:
        folder = self._run_folder(f"undisturbed-{shape.workers}", shape)
        outcome = Experiment(folder, undisturbed(shape), None, LIMIT_S).carry_out()
        if outcome.good:
            self._references[shape.workers] = (
                Reference(outcome.weights, outcome.lives, outcome.steps, outcome.marks),
                PATIENCE * outcome.seconds + PATIENCE_S,
            )
        return outcome

    def _run_folder(self, name: str, shape: Shape) -> Path:
        folder = self.folder / name
        folder.mkdir()
        domains = {"sums": "What is {0} plus {0}?", "words": "Say the word {0} twice."}
        lines = [
            json.dumps({"prompt": text.format(number), "domain": domain})
            for domain, text in domains.items()
            for number in range(10, 20)
        ]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        recipe = RECIPE.format(target=self._target, replicas=shape.replicas, workers=shape.workers, epochs=shape.epochs)
        (folder / "recipe.yaml").write_text(recipe)
        return folder
