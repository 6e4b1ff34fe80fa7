"""Progress for people, as plain lines that read well in a terminal and in a job's log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

_COUNT_KEYS = ("unit", "done", "total")


class Progress:
    """Prints where the run stands. Lines come at most every `every_s` seconds per stage and unit; safe from threads.

    Calling it with a mapping reports counts: `{"unit": "step", "done": 120, "total": 400, "loss": 1.23, "eal": 1.45}`;
    the rate and the time left are its own. Usable wherever a callable that takes a dict is wanted.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._label = "run"
        self._counts: dict[str, _Count] = {}

    def stage(self, name: str, detail: str = "") -> None:
        """Starts a stage: a header line; later lines carry its name."""
        with self._lock:
            self._label = name
            self._counts.clear()
        self._write(f"\n== {name}" + (f": {detail}" if detail else ""))

    def say(self, text: str) -> None:
        """One line, at once."""
        self._write(f"[{self._label}] {text}")

    def __call__(self, update: Mapping[str, Any]) -> None:
        self.update(update)

    def update(self, update: Mapping[str, Any]) -> None:
        """Counts done so far (see the class); prints when a line is due, and always when all is done."""
        unit, done, total = (update.get(key) for key in _COUNT_KEYS)
        unit = str(unit or "step")
        now = self._clock()
        with self._lock:
            count = self._counts.setdefault(unit, _Count(now, int(done or 0)))
            finished = total is not None and done is not None and done >= total
            if count.finished or (now - count.printed_at < self._every_s and not finished):
                return
            count.printed_at = now
            count.finished = finished
        figures = [f"{key} {_number(value)}" for key, value in update.items() if key not in _COUNT_KEYS]
        parts = [_of(unit, done, total), *count.pace(now, done, total, unit), *figures, *count.left(now, done, total)]
        self.say("  ".join(part for part in parts if part))

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says every `every_s` seconds that the run waits for `what`, and since when; a short wait is silent."""
        started = self._clock()
        over = threading.Event()

        def speak() -> None:
            while not over.wait(self._every_s):
                self.say(f"waiting for {what}: {duration(self._clock() - started)}")

        speaker = threading.Thread(target=speak, name="waiting", daemon=True)
        speaker.start()
        try:
            yield
        finally:
            over.set()
            speaker.join()

    def time_table(self, figures: Mapping[str, Any], attempts: int = 1) -> None:
        """Where the time went: a line for each `time.<stage>_s` figure, with its share of `time.total_s`."""
        self._write("\n" + time_table(figures, attempts))

    def _write(self, text: str) -> None:
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()


class _Count:
    """What has been counted of one unit since it began."""

    def __init__(self, started_at: float, first: int) -> None:
        self.started_at = started_at
        self.first = first  # a resumed stage begins above zero: that part says nothing about the pace
        self.printed_at = float("-inf")
        self.finished = False

    def rate(self, now: float, done: Any) -> float:
        elapsed_s = now - self.started_at
        return (float(done) - self.first) / elapsed_s if done is not None and elapsed_s > 0 else 0.0

    def pace(self, now: float, done: Any, total: Any, unit: str) -> list[str]:
        rate = self.rate(now, done)
        if rate <= 0:
            return []
        return [f"{rate:.1f} {unit}s/s" if rate >= 0.1 else f"{1 / rate:.0f} s/{unit}"]

    def left(self, now: float, done: Any, total: Any) -> list[str]:
        rate = self.rate(now, done)
        if total is None or done is None:
            return []
        if done >= total:
            return [f"in {duration(now - self.started_at)}"]
        return [f"{duration((total - done) / rate)} left"] if rate > 0 else []


def _of(unit: str, done: Any, total: Any) -> str:
    if done is None:
        return unit
    return f"{unit} {done}" + (f"/{total}" if total is not None else "")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Seconds as people say them: `12 s`, `4m10s`, `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def time_table(figures: Mapping[str, Any], attempts: int = 1) -> str:
    """The table "where the time went", from the `time.*_s` figures; the rest of the total is `other`."""
    times = {
        key.removeprefix("time.").removesuffix("_s"): float(value)
        for key, value in figures.items()
        if key.startswith("time.") and key.endswith("_s")
    }
    total = times.pop("total", sum(times.values()))
    other = total - sum(times.values())
    rows = [*times.items(), *([("other", other)] if other >= 1 else []), ("total", total)]
    lines = [f"  {name:<12}{duration(value):>8}  {value / total if total else 0:>5.0%}" for name, value in rows]
    title = "where the time went" + (f" ({attempts} attempts together)" if attempts > 1 else "")
    return "\n".join([title, *lines])
