"""The window's bytes: every key from its lease until the store no longer holds it. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable


class Ledger:
    """Which keys hold how many bytes, which replica works on them, and which are to be deleted."""

    def __init__(self, budget_bytes: int, concurrency: int, replicas: Iterable[str]) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.leaving_bytes = 0  # of what is on its way out of the store
        self._concurrency = concurrency
        self._held: dict[str, int] = {}
        self._leaving: dict[str, str] = {}
        self._left: set[str] = set()
        self._busy: dict[str, set[str]] = {replica: set() for replica in replicas}

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that live."""
        return tuple(self._busy)

    def in_flight(self, replica: str) -> int:
        """Captures that a replica works on."""
        return len(self._busy.get(replica, ()))

    def takes_more(self, replica: str) -> bool:
        """True when the replica lives and is not fully busy."""
        return replica in self._busy and self.in_flight(replica) < self._concurrency

    def fits(self, size_bytes: int) -> bool:
        """True when so many bytes more stay in the budget."""
        return self.held_bytes + size_bytes <= self.budget_bytes

    def hold(self, key: str, size_bytes: int, replica: str) -> None:
        """A replica begins to capture `key`: its bytes count from now on."""
        self._busy[replica].add(key)
        self._held[key] = size_bytes
        self.held_bytes += size_bytes

    def answered(self, key: str) -> None:
        """The capture of `key` has ended."""
        for keys in self._busy.values():
            keys.discard(key)

    def add_replica(self, replica: str) -> None:
        """A new replica takes part. ValueError for a name that a living one has."""
        if replica in self._busy:
            raise ValueError(f"there is a {replica} already")
        self._busy[replica] = set()

    def drop_replica(self, replica: str) -> set[str]:
        """A replica died; returns the keys that it was capturing."""
        return self._busy.pop(replica, set())

    def leave(self, key: str, handle: str) -> None:
        """What the store calls `handle` is to be deleted; its bytes count until `released`."""
        self._leaving[key] = handle
        if key not in self._left:
            self._left.add(key)
            self.leaving_bytes += self._held.get(key, 0)

    def take_leaving(self) -> dict[str, str]:
        """Handle by key of what is to be deleted; each is handed out once."""
        leaving, self._leaving = self._leaving, {}
        return leaving

    def released(self, key: str) -> None:
        """The store no longer holds `key`."""
        size_bytes = self._held.pop(key, 0)
        self.held_bytes -= size_bytes
        if key in self._left:
            self._left.discard(key)
            self.leaving_bytes -= size_bytes
