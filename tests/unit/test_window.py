"""The window under any order of events: within its bytes, nothing lost or repeated, always able to go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftline.errors import InputError
from draftline.hidden_states.entries import Lease, State, WindowLimits
from draftline.hidden_states.window import Window
from draftline.samples.plan import BatchPlan, plan_rows

ROW_TOKENS = 24


def make_plan(lengths: Mapping[int, int], held_out: tuple[int, ...] = (), ranks: int = 1, epochs: int = 1) -> BatchPlan:
    return plan_rows(lengths, held_out, row_tokens=ROW_TOKENS, ranks=ranks, epochs=epochs, seed=0)


def largest_position(plan: BatchPlan, sizes: Mapping[int, int]) -> int:
    return max(
        sum(sizes[sample] for rank in range(plan.ranks) for sample in plan.row(position, rank).samples)
        for position in range(plan.positions)
    )


def manifest(key: str) -> dict[str, Any]:
    return {"handle": f"{key}-stored"}


class WindowMachine(RuleBasedStateMachine):
    """Replicas, store and train workers around one window, each of them free to do or suffer anything."""

    @initialize(
        lengths=st.lists(st.integers(1, ROW_TOKENS), min_size=2, max_size=14),
        held_out=st.integers(0, 2),
        ranks=st.integers(1, 3),
        epochs=st.integers(1, 3),
        spare=st.integers(0, 120),
        skipped=st.booleans(),
        early=st.booleans(),
        commits=st.integers(0, 30),
    )
    def start(
        self,
        lengths: list[int],
        held_out: int,
        ranks: int,
        epochs: int,
        spare: int,
        skipped: bool,
        early: bool,
        commits: int,
    ) -> None:
        self.sizes = dict(enumerate(lengths))
        self.plan = make_plan(self.sizes, tuple(range(held_out)), ranks, epochs)
        self.budget = largest_position(self.plan, self.sizes) + spare
        self.window = Window(
            self.plan,
            self.sizes,
            WindowLimits(self.budget, concurrency=2, attempts=3),
            ("a", "b", "c"),
            "run",
            {(len(lengths) - 1, 0): "an earlier attempt gave it up"} if skipped else None,
        )
        self.end, self.finished = self.plan.positions, False
        self.commits_to_finish = commits  # training may be ended early after so many
        self.reached = 0  # first position after all that a worker has been given since the last start
        self.replica_names = ["a", "b", "c"]
        self.leases: dict[str, tuple[Lease, str]] = {}
        self.stored: dict[str, int] = {}  # what the store holds, bytes by key
        self.leaving: list[str] = []
        self.keys: set[str] = set()
        self.groups = 0
        self.first = self.plan.held_out_positions
        self.have: list[dict[int, list[str]]] = [{} for _ in range(ranks)]  # keys that each worker has been given
        self.committed: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(ranks)]
        if early:
            self.window.begin(self.first)
        self.restart(0)

    # Replicas

    @rule(data=st.data())
    def ask_for_work(self, data: st.DataObject) -> None:
        self.lease(data.draw(st.sampled_from(self.replica_names)))

    def lease(self, replica: str) -> None:
        lease = self.window.lease(replica)
        if lease is None:
            return
        assert (lease.sample, lease.epoch) in self.wanted()
        assert replica in self.window.replicas and self.window.in_flight(replica) <= 2
        assert lease.key not in self.keys
        self.keys.add(lease.key)
        self.leases[lease.key] = (lease, replica)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        lease, _ = self.leases.pop(key)
        self.stored[key] = self.sizes[lease.sample]
        self.window.stored(key, manifest(key))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        self.leases.pop(key)
        self.window.failed(key, "no answer")

    @precondition(lambda self: self.window.replicas)
    @rule(data=st.data())
    def replica_dies(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.window.replicas))
        self.window.replica_lost(replica)
        self.leases = {key: (lease, busy) for key, (lease, busy) in self.leases.items() if busy != replica}

    @rule(spare=st.integers(0, 120))
    def replica_comes(self, spare: int) -> None:
        self.add_replica()
        before, wanted = self.window.budget_bytes, largest_position(self.plan, self.sizes) + spare
        self.window.grow(wanted)
        assert self.window.budget_bytes == max(before, min(wanted, self.budget))

    # The store

    @rule()
    def store_dies(self) -> None:
        self.window.store_lost()
        self.stored.clear()

    @precondition(lambda self: self.window.handles())
    @rule(data=st.data())
    def states_vanish(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.window.handles()))))
        self.window.vanished(keys)
        for key in keys:
            self.stored.pop(key, None)

    @rule()
    def delete(self) -> None:
        for key, handle in self.window.take_leaving().items():
            assert handle == f"{key}-stored"
            self.stored.pop(key, None)
            self.leaving.append(key)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def deletion_ends(self, data: st.DataObject) -> None:
        self.window.released(self.leaving.pop(data.draw(st.integers(0, len(self.leaving) - 1))))

    @rule(spare=st.integers(0, 60))
    def segment_goes(self, spare: int) -> None:
        budget = largest_position(self.plan, self.sizes) + spare
        try:
            self.window.shrink(budget)
        except InputError:
            return
        assert self.window.budget_bytes <= budget

    # Train workers

    @rule(rank=st.integers(0, 2), ahead=st.integers(0, 2))
    def ask(self, rank: int, ahead: int) -> None:
        rank %= self.plan.ranks
        self.take(rank, ahead)

    @rule(rank=st.integers(0, 2))
    def commit(self, rank: int) -> None:
        rank %= self.plan.ranks
        position = self.sequence(rank)[0] if self.sequence(rank) else None
        if position is None or position not in self.have[rank]:
            return
        self.window.commit(rank, position)
        self.have[rank].pop(position)
        self.commits_to_finish -= 1
        self.committed[rank].append((position, self.expected(rank, position)))

    @precondition(lambda self: any(self.have))
    @rule(data=st.data())
    def unreadable(self, data: st.DataObject) -> None:
        given_rows = [(rank, position) for rank, rows in enumerate(self.have) for position in rows]
        rank, position = data.draw(st.sampled_from(given_rows))
        keys = self.have[rank][position]
        if keys:
            assert self.window.lost(data.draw(st.sampled_from(keys)), "gone", blameless=data.draw(st.booleans()))
            self.have[rank].pop(position)

    @precondition(lambda self: self.commits_to_finish <= 0)
    @rule()
    def finish_early(self) -> None:
        end = self.window.finish_early()
        if not self.finished:
            assert end == max(self.plan.held_out_positions, self.first, self.reached)
        assert end == self.window.finish_early() <= self.end
        self.end, self.finished = end, True

    @precondition(lambda self: self.end < self.plan.positions)
    @rule(rank=st.integers(0, 2), behind=st.integers(0, 40))
    def ask_for_what_is_left_out(self, rank: int, behind: int) -> None:
        position = self.end + behind % (self.plan.positions - self.end)
        assert self.window.is_over(position)
        with pytest.raises(ValueError):
            self.window.deliver(rank % self.plan.ranks, position)

    @rule(step=st.integers(0, 40))
    def restart(self, step: int) -> None:
        """All workers start again, at any step; some of an earlier group may have got stuck while joining."""
        self.groups += 1
        self.reached = 0
        position = self.first = self.plan.held_out_positions + step % (self.plan.steps + 1)
        if self.plan.ranks > 1:
            self.window.join(0, position, f"stuck {self.groups}")
        for rank in range(self.plan.ranks):
            self.window.join(rank, position, f"group {self.groups}")
        assert self.window.has_begun(f"group {self.groups}")
        self.have = [{} for _ in range(self.plan.ranks)]
        self.committed = [[] for _ in range(self.plan.ranks)]

    # What must hold

    @invariant()
    def stays_within_its_bytes(self) -> None:
        in_the_store = sum(self.stored.values()) + sum(self.sizes[lease.sample] for lease, _ in self.leases.values())
        assert in_the_store <= self.window.held_bytes <= self.budget
        assert sum(self.window.bytes_by_state().values()) == self.window.held_bytes

    @invariant()
    def commits_follow_the_plan(self) -> None:
        for committed in self.committed:
            assert [position for position, _ in committed] == self.all_positions()[: len(committed)]

    def teardown(self) -> None:
        if hasattr(self, "window"):
            self.run_to_the_end()

    def run_to_the_end(self) -> None:
        """From wherever things are, ordinary progress ends the run: ranks in step, each reading two rows ahead."""
        idle = 0
        if not self.window.replicas:
            self.add_replica()
        while any(self.sequence(rank) for rank in range(self.plan.ranks)):
            before = self.progress()
            for replica in self.window.replicas:
                self.lease(replica)
            for key in sorted(self.leases):
                lease, _ = self.leases.pop(key)
                self.stored[key] = self.sizes[lease.sample]
                self.window.stored(key, manifest(key))
            self.stays_within_its_bytes()
            for rank in range(self.plan.ranks):
                for ahead in range(3):
                    self.take(rank, ahead)
            heads = [self.sequence(rank)[0] for rank in range(self.plan.ranks) if self.sequence(rank)]
            for rank in range(self.plan.ranks):
                # A step needs all ranks: nobody commits what another one does not have yet.
                if all(head > min(heads) or min(heads) in self.have[r] for r, head in self.heads()):
                    self.commit_if_head(rank, min(heads))
            self.delete()
            for key in self.leaving:
                self.window.released(key)
            self.leaving = []
            idle = idle + 1 if self.progress() == before else 0
            assert idle < 3, "nothing moves any more"
        self.check_end()

    def check_end(self) -> None:
        for rank, committed in enumerate(self.committed):
            assert committed == [(position, self.expected(rank, position)) for position in self.all_positions()]
        for key in sorted(self.leases):
            self.fail_quietly(key)
        self.delete()
        for key in self.leaving:
            self.window.released(key)
        assert self.window.held_bytes == 0 and not self.stored

    # Helpers

    def take(self, rank: int, ahead: int) -> None:
        sequence = self.sequence(rank)
        if ahead >= len(sequence):
            return
        position = sequence[ahead]
        assert not self.window.is_over(position)
        row = self.window.deliver(rank, position)
        if row is not None:
            self.reached = max(self.reached, position + 1)
            assert tuple(delivery.sample for delivery in row) == self.expected(rank, position)
            assert len({delivery.key for delivery in row}) == len(row)
            self.have[rank][position] = [delivery.key for delivery in row]

    def add_replica(self) -> None:
        self.replica_names.append(f"replica {len(self.replica_names)}")
        self.window.add_replica(self.replica_names[-1])
        with pytest.raises(ValueError, match="already"):
            self.window.add_replica(self.replica_names[-1])

    def wanted(self) -> set[tuple[int, int]]:
        rows = [self.plan.row(position, rank) for position in self.all_positions() for rank in range(self.plan.ranks)]
        return {(sample, row.epoch) for row in rows for sample in row.samples}

    def heads(self) -> list[tuple[int, int]]:
        return [(rank, self.sequence(rank)[0]) for rank in range(self.plan.ranks) if self.sequence(rank)]

    def commit_if_head(self, rank: int, position: int) -> None:
        if self.sequence(rank)[:1] == [position]:
            self.commit(rank)

    def fail_quietly(self, key: str) -> None:
        self.leases.pop(key)
        self.window.failed(key, "the run is over")

    def progress(self) -> tuple[int, int, int]:
        return len(self.keys), sum(map(len, self.committed)), sum(map(len, self.have))

    def all_positions(self) -> list[int]:
        return [*range(self.plan.held_out_positions), *range(self.first, self.end)]

    def sequence(self, rank: int) -> list[int]:
        return self.all_positions()[len(self.committed[rank]) :]

    def expected(self, rank: int, position: int) -> tuple[int, ...]:
        row = self.plan.row(position, rank)
        return tuple(sample for sample in row.samples if (sample, row.epoch) not in self.window.skipped)


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


# Single rules, by example


def simple_window(samples: int = 4, budget_rows: int = 2, attempts: int = 2, epochs: int = 1) -> Window:
    """A window over full rows of one sample each."""
    sizes = dict.fromkeys(range(samples), ROW_TOKENS)
    limits = WindowLimits(budget_rows * ROW_TOKENS, concurrency=4, attempts=attempts)
    window = Window(make_plan(sizes, epochs=epochs), sizes, limits, ("a", "b"), "run")
    window.begin(0)
    return window


def capture(window: Window, replica: str = "a") -> Lease:
    lease = window.lease(replica)
    assert lease is not None
    assert window.stored(lease.key, manifest(lease.key))
    return lease


def test_a_budget_below_one_position_is_refused() -> None:
    sizes = {0: 10, 1: 20}
    plan = make_plan(sizes, ranks=2)
    with pytest.raises(InputError, match=r"window_bytes: found 29; allowed: at least 30 bytes"):
        Window(plan, sizes, WindowLimits(29, 1, 1), ("a",), "run")
    Window(plan, sizes, WindowLimits(30, 1, 1), ("a",), "run")


def test_nothing_is_leased_before_training_says_where_it_starts() -> None:
    sizes = {0: 10}
    window = Window(make_plan(sizes), sizes, WindowLimits(10, 1, 1), ("a",), "run")
    assert window.lease("a") is None
    with pytest.raises(ValueError, match="where training starts"):
        window.deliver(0, 0)


def test_bytes_leave_only_when_the_store_has_let_go() -> None:
    window = simple_window(budget_rows=1)
    capture(window)
    assert window.deliver(0, 0) is not None
    window.commit(0, 0)
    assert window.lease("a") is None and window.held_bytes == ROW_TOKENS
    (key,) = window.take_leaving()
    window.released(key)
    assert window.held_bytes == 0 and window.lease("a") is not None


def test_a_sample_that_always_fails_is_skipped_with_its_reason() -> None:
    window = simple_window(attempts=2)
    first, second = (window.lease(replica) for replica in ("a", "b"))
    assert first and second
    window.failed(first.key, "once")
    again = window.lease("b")
    assert again and again.sample == first.sample and again.key != first.key
    window.failed(again.key, "twice")
    assert window.deliver(0, 0) == []
    assert window.skipped == {(first.sample, 0): "twice"} and window.skipped_share == 0.25


def test_a_late_answer_of_a_dead_lease_is_deleted() -> None:
    window = simple_window()
    lease = window.lease("a")
    assert lease
    window.store_lost()
    assert not window.stored(lease.key, manifest(lease.key))
    assert window.take_leaving() == {lease.key: f"{lease.key}-stored"}


def test_a_row_with_unreadable_states_must_be_asked_for_again() -> None:
    window = simple_window()
    lease = capture(window)
    window.deliver(0, 0)
    assert window.lost(lease.key, "gone") and not window.lost(lease.key, "gone")
    with pytest.raises(ValueError, match="not delivered"):
        window.commit(0, 0)
    assert window.deliver(0, 0) is None
    assert capture(window).sample == lease.sample
    assert window.deliver(0, 0) is not None


def test_a_committed_row_survives_the_loss_of_the_store() -> None:
    window = simple_window()
    capture(window)
    window.deliver(0, 0)
    window.store_lost()
    window.commit(0, 0)
    with pytest.raises(ValueError, match="does not come again"):
        window.deliver(0, 0)


def test_starting_again_at_the_same_place_keeps_what_is_there() -> None:
    window = simple_window()
    capture(window)
    window.deliver(0, 0)
    window.begin(0)
    assert window.deliver(0, 0) is not None and not window.take_leaving()
    window.commit(0, 0)
    window.begin(0)
    assert window.deliver(0, 0) is None and window.take_leaving()


def test_a_group_that_was_replaced_is_told_so() -> None:
    sizes = {0: 10, 1: 10}
    window = Window(make_plan(sizes, ranks=2), sizes, WindowLimits(99, 1, 1), ("a",), "run")
    window.join(0, 0, "first")
    assert not window.has_begun("first")
    window.join(1, 0, "second")
    with pytest.raises(ValueError, match="replaced"):
        window.has_begun("first")
    with pytest.raises(ValueError, match="rank 0 starts at position 1"):
        window.join(0, 1, "second")
    window.join(0, 0, "second")
    assert window.has_begun("second")


def test_a_later_epoch_uses_states_again_when_the_window_holds_them() -> None:
    window = simple_window(samples=3, budget_rows=3, epochs=3)
    for _ in range(3):
        capture(window)
    for position in range(9):
        assert window.lease("a") is None
        assert window.deliver(0, position) is not None
        window.commit(0, position)
    assert len(window.take_leaving()) == 3


def test_states_kept_for_a_later_epoch_make_room_for_what_is_needed_sooner() -> None:
    window = simple_window(samples=3, budget_rows=2, epochs=2)
    captures = 0
    for position in range(6):
        while window.deliver(0, position) is None:
            if window.lease("a") is not None:
                captures += 1
            for key in list(window.take_leaving()):
                window.released(key)
            for entry in [entry for entry in window._live.values() if entry.state is State.LEASED]:
                window.stored(entry.key, manifest(entry.key))
        window.commit(0, position)
    assert 4 <= captures <= 5


def test_training_that_ends_early_ends_after_what_any_rank_has() -> None:
    sizes = dict.fromkeys(range(12), ROW_TOKENS)
    plan = make_plan(sizes, held_out=(0, 1), ranks=2)
    window = Window(plan, sizes, WindowLimits(99 * ROW_TOKENS, 99, 2), ("a",), "run")
    window.begin(plan.held_out_positions)
    leases = [capture(window) for _ in range(8)]
    late = window.lease("a")
    assert late and plan.held_out_positions == 1 and plan.positions == 6
    assert window.deliver(1, 2) is not None  # rank 0 has not asked for its own rows yet
    assert window.finish_early() == 3
    assert not window.is_over(2) and window.is_over(3) and not window.stored(late.key, manifest(late.key))
    assert set(window.take_leaving()) == {late.key} | {lease.key for lease in leases[6:]}
    for rank, position in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)):
        assert window.deliver(rank, position) is not None
    assert window.lease("a") is None
    window.begin(2)
    assert window.finish_early() == 3 and window.lease("a") is not None


def test_training_that_ends_before_it_begins_has_its_held_out_rows() -> None:
    sizes = dict.fromkeys(range(4), ROW_TOKENS)
    plan = make_plan(sizes, held_out=(0,))
    window = Window(plan, sizes, WindowLimits(99 * ROW_TOKENS, 99, 2), ("a",), "run")
    assert window.finish_early() == 1
    window.begin(2)
    assert capture(window).sample == 0 and window.lease("a") is None
    assert window.deliver(0, 0) is not None and window.is_over(2)


def test_states_are_not_kept_for_an_epoch_that_training_does_not_reach() -> None:
    window = simple_window(samples=2, budget_rows=2, epochs=2)
    for position in range(2):
        capture(window)
        window.deliver(0, position)
    window.commit(0, 0)
    assert window.bytes_by_state()["kept"] == ROW_TOKENS
    assert window.finish_early() == 2
    window.commit(0, 1)
    assert window.bytes_by_state()["kept"] == 0 and len(window.take_leaving()) == 2


def test_what_the_store_lost_while_a_reader_had_it_is_not_kept_for_a_later_epoch() -> None:
    window = simple_window(samples=2, budget_rows=2, epochs=2)
    captured = [capture(window) for _ in range(2)]
    assert window.deliver(0, 0) is not None
    window.store_lost()
    window.commit(0, 0)  # it was read in time
    assert set(window.take_leaving()) == {lease.key for lease in captured}
    for lease in captured:
        window.released(lease.key)
    again = set()
    for position in range(1, 4):
        while window.deliver(0, position) is None:
            again.add(capture(window).sample)
        window.commit(0, position)
    assert again == {0, 1}


def test_states_that_are_gone_are_captured_again_when_training_starts_again_where_it_was() -> None:
    window = simple_window()
    lease = capture(window)
    window.deliver(0, 0)
    window.store_lost()
    window.begin(0)
    assert window.deliver(0, 0) is None and set(window.take_leaving()) == {lease.key}
