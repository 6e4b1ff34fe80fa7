"""Trying again: what passes is waited for, patiently but not for ever. Pure: the clock can be brought along."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 15.0


def pauses(jitter: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait before each next try, without end: they double up to `LONGEST_PAUSE_S`.

    Each is between half and all of that, by `jitter` (0 to 1), so that many machines do not come back at once.
    """
    longest = FIRST_PAUSE_S
    while True:
        yield longest * (0.5 + 0.5 * jitter())
        longest = min(LONGEST_PAUSE_S, 2 * longest)


def persist(
    attempt: Callable[[], T],
    passes: Callable[[Exception], bool],
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `attempt` returns; errors that pass are waited for until `patience_s` seconds after the first of them.

    The first failure starts the clock, not the first try: a transfer may well take longer than the patience. Raises
    what the last try raised.
    """
    give_up: float | None = None
    for pause_s in pauses():
        try:
            return attempt()
        except Exception as error:
            if not passes(error):
                raise
            now = clock()
            give_up = now + patience_s if give_up is None else give_up
            if now + pause_s > give_up:
                raise
        sleep(pause_s)
    raise AssertionError("pauses() has no end")
