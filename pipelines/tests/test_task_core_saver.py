"""Which checkpoints a task saves and reports, whatever the store does."""

from __future__ import annotations

from hypothesis import given
from random_histories import histories

from rekindle.engine.model import State
from rekindle.protocol import CheckpointDone, RestorePoint
from rekindle.task.core.events import Woken
from rekindle.task.core.saver import (
    PENDING,
    EntryCommitted,
    EntrySaved,
    SaveAbandoned,
    SaveFailed,
    SaverCore,
    SaverEvent,
    SaveState,
    SkipState,
    StateReached,
)
from rekindle.task.state import TaskState


class Store:
    """Performs the core's effects, and remembers what became of each state."""

    def __init__(self) -> None:
        self.core, self.now, self.epoch = SaverCore(), 0.0, -1
        self.saving: SaveState | None = None
        self.saved: list[int] = []
        self.skipped: list[int] = []
        self.committed = -1

    def step(self, event: SaverEvent) -> None:
        for effect in self.core.step(event, self.now):
            match effect:
                case SkipState(epoch):
                    self.skipped.append(epoch)
                case SaveState(reuse=reuse):
                    assert self.saving is None, "one call at a time"
                    assert reuse == (None if self.committed < 0 else f"entry-{self.committed}")
                    self.saving = effect

    def offer(self) -> None:
        self.epoch += 10
        self.step(StateReached(TaskState(self.epoch, 0, State())))

    def succeed(self) -> None:
        if self.saving is not None:
            epoch, self.saving = self.saving.state.epoch, None
            self.saved.append(epoch)
            done = CheckpointDone(epoch=epoch, object=f"entry-{epoch}", digest="d", bytes=1)
            self.step(EntrySaved(done))

    def fail(self) -> None:
        if self.saving is not None:
            self.saving = None
            self.step(SaveFailed("the store is down"))

    def abandon(self) -> None:
        self.saving = None
        self.step(SaveAbandoned())

    def commit(self) -> None:
        if self.saved and self.saved[-1] > self.committed:
            self.committed = self.saved[-1]
            self.step(
                EntryCommitted(RestorePoint(epoch=self.committed, object=f"entry-{self.committed}"))
            )

    def pass_time(self) -> None:
        self.now += 0.3
        self.step(Woken())


MOVES = histories(("pass_time", "offer", "succeed", "succeed", "commit", "fail", "abandon"), 40)


def play(moves: list[str]) -> Store:
    store = Store()
    for move in moves:
        getattr(store, move)()
    return store


@given(MOVES)
def test_what_is_reported_was_saved_and_is_not_committed(moves: list[str]) -> None:
    store = play(moves)
    reported = [done.epoch for done in store.core.saved()]
    assert reported == [e for e in store.saved if e > store.committed]


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
            store.now = max(store.now, store.core.wake_at)
            store.step(Woken())
        store.succeed()
    assert store.saved[-PENDING:] == [store.epoch - 10, store.epoch]
    assert (store.core.wake_at, store.core.problem) == (None, None)


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
    store.now = 0.2
    store.step(Woken())
    assert store.saving is None
    store.now = 0.25
    store.step(Woken())
    assert store.saving is not None


def test_newer_states_take_the_place_of_a_failed_one() -> None:
    store = Store()
    for _ in range(1 + PENDING):
        store.offer()
    store.fail()
    store.now = 1.0
    store.step(Woken())
    store.succeed()
    store.succeed()
    assert (store.saved, store.skipped) == ([19, 29], [])


def test_a_restored_task_does_not_save_what_is_committed() -> None:
    """Each of these would be all of its state: its objects are those of an older entry."""
    store = Store()
    store.committed = 29
    store.step(EntryCommitted(RestorePoint(epoch=29, object="entry-29")))
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
    store.committed = 29
    store.step(EntryCommitted(RestorePoint(epoch=29, object="entry-29")))
    store.fail()
    store.now = 1.0
    store.step(Woken())
    assert (store.saving, store.core.wake_at) == (None, None)
