"""What follows a failure: recover or give up, by separate budgets for each cause. Pure: the caller brings the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from draftline.recipe.schema import Failures

# What is started again is tried again soon. A full disk or a store that refuses is mended by people or by other
# programs: that takes longer.
LONGEST_PAUSE_S = 5.0
SLOW_TO_PASS, LONGEST_SLOW_PAUSE_S = 5, 60.0


class Cause(StrEnum):
    """What failed."""

    REPLICA = "replica"
    MASTER = "master"
    WORKERS = "workers"
    FEEDER = "feeder"
    ENGINE = "engine"
    STORAGE = "storage"
    DISK = "disk"
    STATE = "state"  # hidden states that were lost or damaged: captured again, limited by hidden_states.attempts
    DRIVER = "driver"  # found by the driver that resumes
    SERVING = "serving"  # Ray Serve starts lost replicas again by itself

    @property
    def recipe_key(self) -> str | None:
        """The field of the recipe's `failures` that holds its budget."""
        return _BUDGET_KEYS.get(self)


_BUDGET_KEYS = {
    Cause.REPLICA: "replicas",
    Cause.MASTER: "masters",
    Cause.WORKERS: "workers",
    Cause.FEEDER: "feeders",
    Cause.ENGINE: "engines",
    Cause.STORAGE: "storage",
    Cause.DISK: "storage",
}


class Action(StrEnum):
    """What is done about a failure."""

    RECOVER = "recover"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, the seconds to wait before it, and why."""

    action: Action
    pause_s: float
    reason: str


@dataclass(slots=True)
class FailurePolicy:
    """Decides by what happened within the last `forget_after_s` seconds of this attempt at the run."""

    failures: Failures
    _times: dict[str, list[float]] = field(default_factory=dict)

    def decide(self, cause: Cause, now: float) -> Decision:
        """Counts one failure at `now` (seconds, any clock that never goes back) and says what follows."""
        key = cause.recipe_key
        if key is None:
            return Decision(Action.RECOVER, 0.0, "needs no budget")
        recent = [time for time in self._times.get(key, []) if now - time < self.failures.forget_after_s]
        self._times[key] = [*recent, now]
        budget, count = int(getattr(self.failures, key)), len(recent) + 1
        if count > budget:
            return Decision(
                Action.FAIL, 0.0, f"failures.{key} allows {budget} within {self.failures.forget_after_s:g} s"
            )
        slow = cause in (Cause.STORAGE, Cause.DISK)
        longer, longest_s = (SLOW_TO_PASS, LONGEST_SLOW_PAUSE_S) if slow else (1, LONGEST_PAUSE_S)
        pause_s = min(longest_s, longer * self.failures.pause_s * 2 ** min(count - 1, 16))
        return Decision(Action.RECOVER, pause_s, f"failure {count} of {budget} that failures.{key} allows")


class Guarantee(StrEnum):
    """What can be said about the weights of a run, were it run again."""

    BITWISE = "bit-identical: whatever was lost on the way, the same recipe gives these weights"
    SAME_STATES = "bit-identical for the same hidden states: training repeats exactly, captures may differ in last bits"


def guarantee(deterministic_extraction: bool, skipped: int) -> Guarantee:
    """Which guarantee held. Samples that had to be skipped depend on what failed, so they void the stronger one."""
    return Guarantee.BITWISE if deterministic_extraction and not skipped else Guarantee.SAME_STATES


def count_by_cause(causes: Mapping[str, int]) -> str:
    """For people: `replica 2, master 1`."""
    return ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
