"""Manifests on a real store: races, entries of other segments, missing states."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from state_parts import count_state, value_in_state

from rekindle.checkpoints import (
    Entry,
    Manifest,
    ManifestStore,
    StateStore,
    Store,
)
from rekindle.coordinator.model import CollectGarbage, StateMigration, WriteManifest
from rekindle.coordinator.shell.store import CheckpointStore
from rekindle.errors import StoreError
from rekindle.protocol import EntryRef
from rekindle.topology.model import Partition

T = TypeVar("T")
UID = "u"


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


@pytest.fixture
def store(url: str) -> CheckpointStore:
    made = CheckpointStore(UID, timeout_s=5.0)
    made.use(url)
    return made


def manifest(seq: int, entries: dict[str, tuple[EntryRef, ...]], fence: int = 1) -> Manifest:
    time = "2026-01-01T00:00:00Z"
    return Manifest(seq, epoch=3, generation=1, fence=fence, time=time, entries=entries)


def save(url: str, segment: str, operator: str, epoch: int) -> EntryRef:
    states = StateStore(Store(url), UID)
    state = count_state(operator, epoch)
    return states.save(segment, 0, epoch, 5, [operator], state, previous=None)


def test_an_empty_store_has_no_manifest(store: CheckpointStore) -> None:
    assert run(store.newest()) is None


def test_an_unreachable_store_is_not_replaced(
    store: CheckpointStore, url: str, tmp_path: Path
) -> None:
    run(store.write(WriteManifest(manifest(0, {}))))
    (tmp_path / "store").rename(tmp_path / "away")
    successor = CheckpointStore(UID, timeout_s=5.0)
    successor.use(url)
    successor.require_store_id(store.id)
    with pytest.raises(StoreError, match="does not exist"):
        run(successor.newest())
    assert not (tmp_path / "store").exists()
    (tmp_path / "away").rename(tmp_path / "store")
    found = run(successor.newest())
    assert found is not None
    assert found.seq == 0


def test_another_store_at_the_url_is_refused(store: CheckpointStore, url: str) -> None:
    store.require_store_id("of another")
    Store(url)
    with pytest.raises(StoreError, match="has used store of another"):
        run(store.newest())


def test_the_first_of_two_with_the_same_number_wins(store: CheckpointStore, url: str) -> None:
    other = CheckpointStore(UID, timeout_s=5.0)
    other.use(url)
    first, second = manifest(0, {}, fence=1), manifest(0, {}, fence=2)
    assert run(store.write(WriteManifest(first))) == first
    assert run(other.write(WriteManifest(second))) is None
    assert run(other.newest()) == first


def test_the_same_manifest_may_be_written_twice(store: CheckpointStore) -> None:
    """An attempt that was reported as failed may have reached the store."""
    for _ in range(2):
        assert run(store.write(WriteManifest(manifest(0, {})))) is not None


def test_an_entry_is_migrated_from_older_segments(store: CheckpointStore, url: str) -> None:
    sources = [save(url, "a", "op-a", 3), save(url, "b", "op-b", 3)]
    names = tuple(s.object for s in sources if s.object)
    migration = StateMigration(Partition("ab", 0), 3, ("op-a", "op-b", "op-new"), names)
    unmigrated = manifest(0, {"ab/0": (EntryRef(3, None, ""),)})
    written = run(store.write(WriteManifest(unmigrated, migrations=(migration,))))
    assert written is not None
    (ref,) = written.entries["ab/0"]
    assert ref.object is not None
    entry, state = StateStore(Store(url), UID).load(ref.object)
    assert (entry.segment, entry.epoch, entry.operators) == ("ab", 3, ("op-a", "op-b"))
    assert value_in_state(state, "op-b") == 3
    again = run(store.write(WriteManifest(unmigrated, migrations=(migration,))))
    assert again == written, "every coordinator makes the same object"
    run(store.collect_garbage(CollectGarbage(retain=1)))
    assert run(store.not_committable([ref.object])) == {}


def test_no_entry_of_an_old_checkpoint_stays_in_memory(store: CheckpointStore, url: str) -> None:
    for seq in range(10):
        ref = save(url, "a", "op-a", seq)
        assert ref.object is not None
        assert run(store.not_committable([ref.object])) == {}
        assert run(store.write(WriteManifest(manifest(seq, {"a/0": (ref,)})))) is not None
        run(store.collect_garbage(CollectGarbage(retain=1)))
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, Entry)]


def test_garbage_collection_finds_what_others_deleted(store: CheckpointStore, url: str) -> None:
    assert store.unrestorable == {}
    ref = save(url, "a", "op-a", 3)
    assert ref.object is not None
    assert run(store.write(WriteManifest(manifest(0, {"a/0": (ref,)})))) is not None
    objects = Store(url)
    (lost,) = (info.name for info in objects.list(f"{UID}/state/"))
    objects.delete(lost)
    run(store.collect_garbage(CollectGarbage(retain=1)))
    assert list(store.unrestorable) == [ref.object]


def test_missing_states_are_named(store: CheckpointStore, url: str) -> None:
    ref = save(url, "a", "op-a", 3)
    assert ref.object is not None
    objects = Store(url)
    (state,) = [i.name for i in objects.list(f"{UID}/state/")]
    objects.delete(state)
    lost = f"state object {state.removeprefix(f'{UID}/')} is missing"
    assert run(store.not_committable([ref.object])) == {ref.object: lost}


def test_a_call_after_a_timeout_sees_the_outcome(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(UID, timeout_s=0.1)
    store.use(url)
    write = ManifestStore.write

    def slow(self: ManifestStore, manifest: Manifest) -> bool:
        time.sleep(0.3)
        return write(self, manifest)

    monkeypatch.setattr(ManifestStore, "write", slow)

    async def scenario() -> Manifest | None:
        with pytest.raises(StoreError, match="did not end"):
            await store.write(WriteManifest(manifest(0, {})))
        for _ in range(10):
            try:
                return await store.newest()
            except StoreError:
                continue
        raise AssertionError

    assert run(scenario()) == manifest(0, {})


def test_without_a_generation_no_store_is_known() -> None:
    with pytest.raises(StoreError, match="no checkpoint store"):
        run(CheckpointStore(UID, timeout_s=1.0).newest())
