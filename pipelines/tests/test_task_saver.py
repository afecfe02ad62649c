"""The saver on a real store: what a replica that takes over uploads, and what was lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from state_parts import of_runs
from task_world import World

from rekindle.checkpoints.manifest import Entry, Manifest
from rekindle.checkpoints.manifests import ManifestStore
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.state.runs import Run
from rekindle.protocol import EntryRef, RestorePoint
from rekindle.task.core.saver import SaverCore
from rekindle.task.state import TaskState
from rekindle.workers import CallTimer
from rekindle_testing.waiting import eventually

ROWS = [np.random.default_rng(n).integers(0, 1 << 62, 20_000) for n in range(4)]
STATE_BYTES = 100_000  # more than any entry, less than one run


class Replica:
    """A replica of a partition whose state does not change."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.states = StateStore(store, "u")
        self.state = State({"op": of_runs(*(Run(pa.table({"x": rows})) for rows in ROWS))})
        self.saver = World(directory, states=self).saver

    def save(self, state: TaskState, previous: Entry | None) -> EntryRef:
        return self.states.save("s", 0, state.epoch, 0, ("op",), state.operators, previous)

    def load_entry(self, name: str) -> Entry:
        return self.states.load_entry(name)

    def reach(self, epoch: int) -> EntryRef:
        self.saver.offer(TaskState(epoch, 0, self.state))
        eventually(lambda: any(done.epoch == epoch for done in self.saver.done()))
        return self.saver.done()[-1]

    def commit(self, done: EntryRef) -> None:
        self.saver.commit(RestorePoint(epoch=done.epoch, object=done.object))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def replicas(store: Store, tmp_path: Path) -> Iterator[tuple[Replica, Replica]]:
    both = Replica(store, tmp_path / "log-0"), Replica(store, tmp_path / "log-1")
    yield both
    for replica in both:
        replica.saver.stop(1)


def test_a_replica_that_takes_over_uploads_its_state_once(
    replicas: tuple[Replica, Replica],
) -> None:
    """Its sinks are slow: none of its entries is committed."""
    first, second = replicas
    second.commit(first.reach(9))
    uploaded = [second.reach(epoch).bytes > STATE_BYTES for epoch in (19, 29, 39, 49)]
    assert uploaded == [True, False, False, False]


def test_a_save_that_waits_for_restored_state_is_no_problem(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, goes_on = replicas[0], threading.Event()
    replica.saver.port._call_timer = CallTimer(slow_s=0.01)
    save = StateStore.save

    def slow(*args: Any) -> EntryRef:
        assert goes_on.wait(10)
        return save(*args)

    monkeypatch.setattr(StateStore, "save", slow)
    replica.saver.report(SaverCore.state_incomplete)
    replica.saver.offer(TaskState(9, 0, replica.state))
    eventually(lambda: replica.saver.port._call_timer.problem is not None)
    assert replica.saver.problem is None
    replica.saver.report(SaverCore.state_complete)
    assert "has not ended" in (replica.saver.problem or "")
    goes_on.set()
    eventually(lambda: replica.saver.done() != ())


def test_what_was_lost_is_uploaded_again(
    replicas: tuple[Replica, Replica], store: Store, tmp_path: Path
) -> None:
    replica, manifests = replicas[0], ManifestStore(store, "u")

    def commit(seq: int, done: EntryRef) -> None:
        assert manifests.not_committable([done.object or ""]) == {}
        entries = {"s/0": (done,)}
        assert manifests.write(
            Manifest(seq, done.epoch, generation=1, fence=1, time="", entries=entries)
        )
        replica.commit(done)

    commit(1, replica.reach(9))
    (lost,) = (tmp_path / "store" / "u" / "state").rglob("*.arrow")
    lost.unlink()
    manifests.collect_garbage(retain=1)
    reusing = replica.reach(19)
    assert reusing.object is not None
    assert list(manifests.not_committable([reusing.object])) == [reusing.object]
    replica.saver.refuse(frozenset({reusing.object, *manifests.unrestorable}))
    assert replica.saver.done() == ()
    again = replica.reach(29)
    commit(2, again)
    assert again.bytes > STATE_BYTES
    replica.states.load(again.object or "")
