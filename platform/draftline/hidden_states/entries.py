"""What the window is made of: one entry for each sample in it, and what it hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Where a sample is on its way from the plan to a train worker."""

    PLANNED = "planned"
    LEASED = "leased"
    STORED = "stored"
    DELIVERED = "delivered"
    CONSUMED = "consumed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """What a window may take.

    `budget_bytes`: most bytes in the store; `concurrency`: captures of one replica at once; `attempts`: tries at one
    sample before it is skipped.
    """

    budget_bytes: int
    concurrency: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A capture to be made, under a key that was never used before."""

    key: str
    sample: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One sample of a row: its states lie in the store, as `manifest` says. `key` is what to call it when lost.

    `store` is the address of the master that the states are to be asked from; a reader joins it (`rejoin`) first.
    """

    sample: int
    epoch: int
    key: str
    manifest: Mapping[str, Any]
    store: str = ""


@dataclass(slots=True)
class Entry:
    """One sample in the window; `order` is its row and its place in it, `size_bytes` what its states take."""

    order: tuple[int, int]
    sample: int
    epoch: int
    size_bytes: int
    attempt: int
    state: State = State.PLANNED
    failures: int = 0
    gone: bool = False  # the store lost its states while a reader had them
    key: str = ""
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def handle(self) -> str:
        """What the store calls the states."""
        return str(self.manifest["handle"])


@dataclass(slots=True)
class OpenRow:
    """A row that the window has begun; `delivered` once its rank has it whole."""

    entries: list[Entry]
    delivered: bool = False
