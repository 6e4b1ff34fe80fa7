"""What every stage of a run works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.recipe.schema import Recipe
from draftline.runs.actors import RunActors
from draftline.runs.frame import PipelineOptions, RunFrame
from draftline.samples.prompts import Prompt
from draftline.targets.resolve import ResolvedTarget


@dataclass(frozen=True, slots=True)
class RunContext:
    """Made once, when the recipe, the target and the prompts have been checked."""

    recipe: Recipe
    target: ResolvedTarget
    mask_token_id: int
    prompts: Sequence[Prompt]
    prompt_token_ids: Sequence[Sequence[int]]
    options: PipelineOptions
    frame: RunFrame
    actors: RunActors

    @property
    def samples_file(self) -> Path:
        """The samples that `prepare` makes."""
        return self.frame.folder.samples / "samples.parquet"

    def key(self, purpose: str, number: int) -> str:
        """A request id outside the feeder's, new in every attempt at a stage: store keys are never used again."""
        attempt = sum(len(stage.attempts) for stage in self.frame.record.stages.values())
        return f"{self.recipe.run_id}-{len(self.frame.record.attempts)}.{attempt}-{purpose}-{number}"
