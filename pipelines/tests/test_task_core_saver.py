"""Which checkpoints a task saves and reports, whatever the store does."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from random_histories import histories
from state_parts import of_runs

from rekindle.engine.model import State
from rekindle.engine.state.runs import Run, RunFile
from rekindle.protocol import EntryRef, RestorePoint
from rekindle.task.core.saver import PENDING, SaverCore, SaverEffect, SaveState, SkipCheckpoint
from rekindle.task.core.snapshots import Held, Holder, Snapshots, SnapshotsFull
from rekindle.task.state import TaskState


class Store:
    """Performs the core's effects, and remembers what became of each state. Each save makes an
    object, and refers to all objects of the entry that it reuses; `lost` objects are gone."""

    def __init__(self) -> None:
        self.core, self.now, self.epoch = SaverCore(), 0.0, -1
        self.saving: SaveState | None = None
        self.saved: list[int] = []
        self.skipped: list[int] = []
        self.refused: list[int] = []
        self.committed = -1
        self.objects: dict[str, frozenset[int]] = {}
        self.lost: set[int] = set()

    def perform(self, effects: list[SaverEffect]) -> None:
        for effect in effects:
            match effect:
                case SkipCheckpoint(epoch):
                    self.skipped.append(epoch)
                case SaveState(reuse=reuse):
                    assert self.saving is None, "one call at a time"
                    if not self.refused:
                        assert reuse == self.newest_kept()
                    self.saving = effect

    def newest_kept(self) -> str | None:
        """The newest entry that garbage collection keeps: it is committed, or may be."""
        newest = max([self.committed, *self.saved])
        return None if newest < 0 else f"entry-{newest}"

    def offer(self) -> None:
        self.epoch += 10
        self.perform(self.core.state_reached(TaskState(self.epoch, 0, State()), self.now))

    def succeed(self) -> None:
        if self.saving is not None:
            epoch, reuse, self.saving = self.saving.state.epoch, self.saving.reuse, None
            self.saved.append(epoch)
            self.objects[f"entry-{epoch}"] = self.objects.get(reuse or "", frozenset()) | {epoch}
            done = EntryRef(epoch=epoch, object=f"entry-{epoch}", digest="d", bytes=1)
            self.perform(self.core.entry_saved(done, self.now))

    def fail(self) -> None:
        if self.saving is not None:
            self.saving = None
            self.perform(self.core.save_failed("the store is down", self.now))

    def abandon(self) -> None:
        self.saving = None
        self.perform(self.core.save_abandoned(self.now))

    def commit(self) -> None:
        """The newest entry, if it can be restored; otherwise it is refused."""
        newest = next((e for e in reversed(self.saved) if e not in self.refused), -1)
        if newest <= self.committed:
            return
        if not self.is_restorable(newest):
            self.refused.append(newest)
            self.repeat_poll()
            return
        self.entry_committed(newest)

    def entry_committed(self, epoch: int) -> None:
        self.committed = epoch
        point = RestorePoint(epoch=epoch, object=f"entry-{epoch}")
        self.perform(self.core.entry_committed(point, self.now))

    def is_restorable(self, epoch: int) -> bool:
        return not self.objects.get(f"entry-{epoch}", frozenset()) & self.lost

    def lose(self) -> None:
        """The oldest object of the committed entry, or that of the oldest saved one."""
        entries = (self.objects.get(f"entry-{e}", ()) for e in (self.committed, *self.saved))
        if needed := next(filter(None, entries), None):
            self.lost.add(min(needed))

    def sweep(self) -> None:
        """Find out whether the committed entry can still be restored."""
        if self.committed not in self.refused and not self.is_restorable(self.committed):
            self.refused.append(self.committed)
            self.repeat_poll()

    def repeat_poll(self) -> None:
        if self.refused:
            refused = frozenset(f"entry-{e}" for e in self.refused)
            self.perform(self.core.entries_refused(refused, self.now))

    def pass_time(self) -> None:
        self.wake_at(self.now + 0.3)

    def wake_at(self, now: float) -> None:
        self.now = now
        self.perform(self.core.woken(now))


MOVES = histories(
    (
        *("pass_time", "offer", "succeed", "succeed", "commit", "fail", "abandon"),
        *("lose", "sweep", "repeat_poll"),
    ),
    40,
)


def play(moves: list[str]) -> Store:
    store = Store()
    for move in moves:
        getattr(store, move)()
    return store


@given(MOVES)
def test_what_is_reported_was_saved_and_is_not_committed(moves: list[str]) -> None:
    store = play(moves)
    reported = [done.epoch for done in store.core.saved()]
    assert reported == [e for e in store.saved if e > store.committed and e not in store.refused]


@given(MOVES)
def test_states_are_saved_in_order_and_once(moves: list[str]) -> None:
    saved = play(moves).saved
    assert saved == sorted(set(saved))


@given(MOVES)
def test_the_newest_states_are_saved_once_the_store_responds(moves: list[str]) -> None:
    store = play(moves)
    for _ in range(PENDING):
        store.offer()
    for _ in range(PENDING + 1):
        if store.core.wake_at is not None:
            store.wake_at(max(store.now, store.core.wake_at))
        store.succeed()
    assert store.saved[-PENDING:] == [store.epoch - 10, store.epoch]
    assert (store.core.wake_at, store.core.problem) == (None, None)


@given(MOVES)
def test_after_refusals_what_is_committed_can_be_restored(moves: list[str]) -> None:
    store = play(moves)
    store.sweep()
    store.commit()
    for offers in (True, True, True, False, False, False):
        if offers:
            store.offer()
        store.wake_at(max(store.now, store.core.wake_at or 0.0))
        store.succeed()
        store.commit()
    assert store.is_restorable(store.committed)
    assert store.committed == store.epoch


def test_a_saver_that_takes_over_saves_all_of_its_state_once() -> None:
    """While the committed entry is another replica's, whose objects it does not have."""
    store = Store()
    store.epoch = 9
    store.entry_committed(9)
    for _ in range(5):
        store.offer()
        store.succeed()
    assert store.objects["entry-59"] == {19, 29, 39, 49, 59}


def test_nothing_of_what_was_saved_before_a_refusal_is_reused() -> None:
    store = Store()
    for _ in range(3):
        store.offer()
        store.succeed()
    store.offer()
    store.refused.append(19)
    store.repeat_poll()
    assert [done.epoch for done in store.core.saved()] == [9, 29]
    store.succeed()
    store.offer()
    assert store.saving is not None
    assert store.saving.reuse is None
    store.succeed()
    store.repeat_poll()
    store.offer()
    assert store.saving is not None
    assert store.saving.reuse == "entry-49"


def test_a_committed_entry_that_is_refused_is_not_reused() -> None:
    store = Store()
    store.offer()
    store.succeed()
    store.commit()
    store.refused.append(9)
    store.repeat_poll()
    store.offer()
    assert store.saving is not None
    assert store.saving.reuse is None


@given(MOVES)
def test_a_core_is_saving_or_says_when_to_wake_it(moves: list[str]) -> None:
    store = play(moves)
    store.offer()
    assert (store.saving is None) == (store.core.wake_at is not None)


def test_a_failed_state_is_saved_again_after_a_back_off() -> None:
    store = Store()
    store.offer()
    store.fail()
    assert store.core.problem == "the checkpoint of epoch 9 cannot be saved: the store is down"
    assert store.core.wake_at == 0.25
    store.wake_at(0.2)
    assert store.saving is None
    store.wake_at(0.25)
    assert store.saving is not None


def test_newer_states_take_the_place_of_a_failed_one() -> None:
    store = Store()
    for _ in range(1 + PENDING):
        store.offer()
    store.fail()
    store.wake_at(1.0)
    store.succeed()
    store.succeed()
    assert (store.saved, store.skipped) == ([19, 29], [])


def test_a_restored_task_does_not_save_what_is_committed() -> None:
    """Each of these would be all of its state: its objects are those of an older entry."""
    store = Store()
    store.entry_committed(29)
    for _ in range(3):
        store.offer()
        assert store.saving is None
    store.offer()
    assert store.saving is not None
    assert store.saving.state.epoch == 39


def test_a_state_that_waits_is_not_saved_after_a_newer_commit() -> None:
    store = Store()
    for _ in range(3):
        store.offer()
    store.entry_committed(29)
    store.fail()
    store.wake_at(1.0)
    assert (store.saving, store.core.wake_at) == (None, None)


def test_entries_are_reported_once_the_restored_state_is_complete() -> None:
    """Until then nobody has read the objects that they share with the restored entry."""
    store = Store()
    store.perform(store.core.state_incomplete(store.now))
    store.offer()
    store.succeed()
    assert store.core.saved() == ()
    store.offer()
    assert store.saving is not None
    assert store.saving.reuse == "entry-9"
    store.succeed()
    store.perform(store.core.state_complete(store.now))
    assert [done.epoch for done in store.core.saved()] == [9, 19]


# -- snapshots -----------------------------------------------------------------------------------


@given(MOVES)
def test_a_state_is_kept_while_it_waits_or_is_saved(moves: list[str]) -> None:
    store = Store()
    for move in moves:
        getattr(store, move)()
        waiting = [] if store.saving is None else [store.saving.state.epoch]
        held = [held.name for held in store.core.snapshots.held(State())]
        assert len(held) <= PENDING + 1
        assert all(store.core.snapshots.find(name) for name in held)
        epochs = [int(name.split("-")[1]) for name in held]
        assert set(waiting) <= set(epochs)
        assert len(set(epochs)) == len(epochs)
        assert not held or store.saving is not None or store.core.wake_at is not None


def state_of(epoch: int, *runs: Run) -> TaskState:
    return TaskState(epoch, 0, State({"op": of_runs(*runs)}))


def test_what_a_snapshot_keeps_is_what_the_newest_state_lacks() -> None:
    snapshots = Snapshots()
    old, shared, new = (Run(pa.table({"n": [number] * 10})) for number in range(3))
    taken = snapshots.take(Holder.CHECKPOINT, state_of(3, old, shared))
    moved = Run(shared.table, shared.id, RunFile(80))
    assert snapshots.held(state_of(3, old, shared).operators) == (Held("checkpoint-3-1", 0),)
    assert snapshots.held(state_of(4, shared, new).operators) == (Held("checkpoint-3-1", 80),)
    assert snapshots.held(state_of(4, moved, new).operators) == (Held("checkpoint-3-1", 160),)
    spilled = snapshots.take(Holder.CHECKPOINT, state_of(4, moved))
    assert snapshots.held(state_of(5, new).operators)[1] == Held("checkpoint-4-2", 0)
    snapshots.release(spilled.name)
    assert snapshots.find("checkpoint-3-1") is taken
    snapshots.release(taken.name)
    snapshots.release(taken.name)
    assert snapshots.find(taken.name) is None
    assert snapshots.held(State()) == ()


def test_snapshots_are_bounded() -> None:
    snapshots = Snapshots(most=2, most_bytes=100)
    one, two, three = (state_of(n, Run(pa.table({"n": [n] * 10}))) for n in range(3))
    first = snapshots.take(Holder.CHECKPOINT, one)
    snapshots.take(Holder.CHECKPOINT, two)
    with pytest.raises(SnapshotsFull, match="checkpoint-0-1, checkpoint-1-2 keep 160 bytes"):
        snapshots.take(Holder.CHECKPOINT, three)
    snapshots.release(first.name)
    assert snapshots.take(Holder.CHECKPOINT, three).epoch == 2
    with pytest.raises(SnapshotsFull, match="at most 2 may keep 100"):
        snapshots.take(Holder.CHECKPOINT, one)


def test_a_checkpoint_that_would_keep_too_much_is_skipped() -> None:
    """The oldest that waits first; the newest if the one that is being saved keeps too much."""
    core = SaverCore(Snapshots(most_bytes=100))
    states = [state_of(n, Run(pa.table({"n": [n] * 10}))) for n in range(5)]
    assert core.state_reached(states[0], 0.0) == [SaveState(states[0], None)]
    assert core.state_reached(states[1], 0.0) == []
    assert core.state_reached(states[2], 0.0) == [SkipCheckpoint(1)]
    heavy = state_of(3, *(Run(pa.table({"n": [n] * 20})) for n in range(2)))
    core = SaverCore(Snapshots(most_bytes=100))
    core.state_reached(heavy, 0.0)
    assert core.state_reached(states[4], 0.0) == [SkipCheckpoint(4)]
    done = EntryRef(epoch=3, object="entry-3", digest="d", bytes=1)
    assert core.entry_saved(done, 0.0) == []
    assert core.state_reached(states[4], 0.0) == [SaveState(states[4], "entry-3")]
