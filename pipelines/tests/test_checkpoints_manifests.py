"""Manifests: one coordinator wins, and garbage collection never deletes what is needed.

"u" is the uid of a topology. `StateStore.save` gets segment, partition, epoch, watermark,
operators, state, and the entry whose objects may be used again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from state_parts import count_state, of_runs, tables_of, value_in_state

from rekindle.checkpoints.codec import (
    CheckpointName,
    checksum,
    decode_manifest,
    encode_manifest,
    entry_name,
    log_prefix,
    manifest_name,
    parse_log_name,
    state_name,
)
from rekindle.checkpoints.fetching import Fetch
from rekindle.checkpoints.garbage import find_garbage
from rekindle.checkpoints.manifest import Entry, Manifest, QueryStart
from rekindle.checkpoints.manifests import FULL_SCAN_S, ManifestStore
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.state.runs import Run
from rekindle.errors import ObjectMissing, StateLost, StoreError
from rekindle.objects import ObjectInfo, to_json
from rekindle.protocol import EntryRef, RestorePoint, TaskRef
from rekindle.task.core.saver import SaverCore, SaverEffect, SaveState
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot


def manifest(seq: int, epoch: int = 9, fence: int = 1, **entries: EntryRef) -> Manifest:
    """`entries`: by segment and partition: `s__0` is partition 0 of the segment s."""
    named = {key.replace("__", "/"): (ref,) for key, ref in entries.items()}
    queries = {"q": QueryStart(3, "id")}
    return Manifest(
        seq,
        epoch,
        generation=1,
        fence=fence,
        time="2026-01-01T00:00:00Z",
        entries=named,
        queries=queries,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def test_the_newest_manifest_is_read_as_written(store: Store) -> None:
    manifests = ManifestStore(store, "u")
    assert manifests.newest() is None
    first, second = manifest(1), manifest(2, s__0=EntryRef(9, "entries/x", "d", 5))
    assert manifests.write(first)
    assert manifests.write(second)
    assert manifests.newest() == second
    assert manifests.seqs() == [1, 2]
    assert ManifestStore(store, "other").newest() is None


def test_of_two_manifests_with_the_same_number_one_is_committed(store: Store) -> None:
    attempts = [manifest(5, fence=f) for f in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda m: ManifestStore(store, "u").write(m), attempts))
    assert sum(won) == 1
    assert ManifestStore(store, "u").newest() == attempts[won.index(True)]


def test_the_same_manifest_may_be_written_twice(store: Store) -> None:
    assert ManifestStore(store, "u").write(manifest(1))
    assert ManifestStore(store, "u").write(manifest(1))
    assert not ManifestStore(store, "u").write(manifest(1, fence=2))


def test_a_paused_coordinator_commits_no_deleted_number(store: Store) -> None:
    manifests = ManifestStore(store, "u")
    for seq in range(1, 6):
        manifests.write(manifest(seq))
    store.delete(f"u/{manifest_name(1)}")
    assert not manifests.write(manifest(1))
    newest = manifests.newest()
    assert newest is not None
    assert newest.seq == 5


def age(root: Path, seconds: float) -> None:
    """As if all files there had been written so much earlier."""
    for path in root.rglob("*"):
        if path.is_file():
            stat = path.stat()
            os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def test_garbage_is_collected_and_the_rest_restores(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    steady, previous, refs = Run(pa.table({"n": [1]})), None, []
    for seq in range(6):
        age(tmp_path / "store" / "u", 100)
        state = State({"op": of_runs(steady, Run(pa.table({"n": [seq]})))})
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), state, previous)
        assert ref.object is not None
        previous = states.load_entry(ref.object)
        refs.append(ref)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
    pending = states.save("seg", 0, 999, 0, ("op",), State({"op": of_runs(steady)}), previous)
    age(tmp_path / "store" / "u" / "entries", 1000)
    age(tmp_path / "store" / "u" / "state", 1000)
    cleared = manifests.collect_garbage(retain=2)
    assert cleared == 4 + 4 + 3  # manifests, entries, and their own runs but the steady one
    assert manifests.seqs() == [4, 5]
    for ref in (*refs[4:], pending):
        assert ref.object is not None
        assert tables_of(states.load(ref.object)[1])[0].equals(steady.table)
        assert not manifests.not_committable([ref.object])
    assert manifests.collect_garbage(retain=2) == 0


def test_entries_that_tasks_still_read_are_kept(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    refs = []
    for seq in range(4):
        age(tmp_path / "store" / "u", 100)
        refs.append(states.save("seg", 0, seq * 10 + 9, 0, ("op",), count_state("op", seq), None))
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=refs[-1]))
    age(tmp_path / "store" / "u", 1000)
    old, read = refs[0].object, refs[1].object
    assert old is not None
    assert read is not None
    in_use = frozenset({read, "entries/seg/0/000000000001-aa-01.json"})  # one is gone
    _, state, fetch = StateStore(store, "u").open(read)
    manifests.collect_garbage(1, full_scan=True, in_use=in_use)
    assert manifests.unrestorable == {}
    fetch.finish()
    assert value_in_state(state, "op") == 1
    with pytest.raises(StoreError):
        states.load(old)
    assert manifests.collect_garbage(1) == 2, "an entry and its object"
    with pytest.raises(StoreError):
        states.load(read)


def test_what_a_task_found_damaged_is_neither_committed_nor_restored(
    store: Store, tmp_path: Path
) -> None:
    """Until somebody repairs it; what is only said to be damaged stays usable."""
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    old = states.save("seg", 0, 9, 0, ("op",), count_state("op", 1), None)
    assert old.object is not None
    entry = states.load_entry(old.object)
    new = states.save("seg", 0, 19, 0, ("op",), states.load(old.object)[1], entry)
    assert new.object is not None
    assert manifests.write(manifest(0, 9, seg__0=old))
    (shared,) = entry.objects["op"]
    manifests.collect_garbage(1, reported_lost={shared, "state/op/of-another-1-0-1-2.arrow"})
    assert manifests.unrestorable == {}
    path = tmp_path / "store" / "u" / shared
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    manifests.collect_garbage(1)
    assert manifests.unrestorable == {}, "nobody has said so"
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreError):
        manifests.collect_garbage(1, reported_lost={shared})
    (tmp_path / "away").rename(tmp_path / "store")
    manifests.collect_garbage(1)
    for _ in range(2):
        assert manifests.unrestorable.keys() == {old.object, new.object}
        assert "is damaged" in manifests.unrestorable[old.object]
        assert manifests.not_committable([new.object]).keys() == {new.object}
        manifests.collect_garbage(1)
    path.write_bytes(whole)
    manifests.collect_garbage(1)
    assert manifests.unrestorable == {}
    assert manifests.not_committable([new.object]) == {}


def test_many_damaged_objects_are_read_again_only_when_the_whole_store_is_listed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, now = StateStore(store, "u"), 0.0
    manifests = ManifestStore(store, "u", clock=lambda: now)
    refs = [states.save("seg", p, 9, 0, ("op",), count_state("op", p), None) for p in range(20)]
    entries = {f"seg/{p}": (ref,) for p, ref in enumerate(refs)}
    assert manifests.write(replace(manifest(0, 9), entries=entries))
    files = (tmp_path / "store" / "u" / "state").rglob("*.arrow")
    whole = {path: path.read_bytes() for path in files}
    assert manifests.collect_garbage(1) == 0
    for path, data in whole.items():
        path.write_bytes(data[:-8])
    names = {info.name.removeprefix("u/") for info in store.list("u/state/")}
    manifests.collect_garbage(1, reported_lost=names)
    assert manifests.unrestorable.keys() == {ref.object for ref in refs}
    for path, data in whole.items():
        path.write_bytes(data)
    manifests.collect_garbage(1)
    assert len(manifests.unrestorable) == 20
    now += FULL_SCAN_S
    manifests.collect_garbage(1)
    assert manifests.unrestorable == {}


def test_a_missing_object_that_a_task_names_makes_a_collection_look_for_others(
    store: Store,
) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    refs = [
        states.save("seg", p, 9, 0, ("op",), count_state("op", p), None, chained_digest=f"{p}")
        for p in range(2)
    ]
    assert manifests.write(manifest(0, 9, seg__0=refs[0], seg__1=refs[1]))
    manifests.collect_garbage(1)
    lost = [name for ref in refs for name in states.load_entry(ref.object or "").objects["op"]]
    for name in lost:
        store.delete(f"u/{name}")
    manifests.collect_garbage(1)
    assert manifests.unrestorable == {}
    manifests.collect_garbage(1, reported_lost={lost[0]})
    assert manifests.unrestorable.keys() == {ref.object for ref in refs}


def test_unusable_entries_name_what_is_missing(store: Store) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    ref = states.save("s", 0, 9, 0, ("op",), count_state("op", 1), None)
    assert ref.object is not None
    name = states.load_entry(ref.object).objects["op"][0]
    store.delete(f"u/{name}")
    assert manifests.not_committable([ref.object]) == {
        ref.object: f"state object {name} is missing"
    }


def test_an_unreadable_entry_does_not_stop_gc(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    for seq in range(3):
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), count_state("op", seq), None)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
    newer = "entries/seg/0/000000000039-ab-cd.json"
    store.put(f"u/{newer}", b'{"format": 99}')
    assert "format 99" in manifests.not_committable([newer])[newer]
    for part in ("entries", "state"):
        age(tmp_path / "store" / "u" / part, 1000)
    held = len(store.list("u/state/"))
    with pytest.raises(StoreError, match="format 99"):
        manifests.collect_garbage(retain=1)
    assert manifests.seqs() == [2]
    assert len(store.list("u/state/")) == held, "it is unknown what it needs"


def test_a_needed_unreadable_entry_is_kept(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    ref = states.save("seg", 0, 9, 0, ("op",), count_state("op", 1), None)
    assert manifests.write(manifest(0, 9, seg__0=ref))
    assert ref.object is not None
    (tmp_path / "store" / "u" / ref.object).write_bytes(b'{"format": 99}')
    age(tmp_path / "store" / "u" / "entries", 1000)
    with pytest.raises(StoreError, match="format 99"):
        manifests.collect_garbage(retain=1)
    assert [info.name for info in store.list("u/entries/")] == [f"u/{ref.object}"]


def test_garbage_collection_reads_an_entry_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    read: list[str] = []
    get = store.get

    def reading(name: str) -> bytes:
        read.append(name)
        return get(name)

    monkeypatch.setattr(store, "get", reading)
    for seq in range(20):
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), count_state("op", seq), None)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
        manifests.collect_garbage(retain=2)
    entries = [name for name in read if name.startswith("u/entries/")]
    assert len(entries) == len(set(entries)) == 20


@st.composite
def histories(
    draw: st.DrawFn,
) -> tuple[list[ObjectInfo], list[Manifest], dict[str, frozenset[str]], set[str], set[str]]:
    """A store after a random history: partitions save at their own pace, some saves are committed,
    some hang between saving and committing. Returns its objects, the retained manifests, to which
    state objects the entries refer that must stay, what must stay, and the names of all objects."""
    partitions, objects, refs = ["a", "b"], [], {}
    committed: dict[str, EntryRef] = {p: EntryRef(-1, None, "") for p in partitions}
    held: dict[str, frozenset[str]] = {}
    pending: dict[str, EntryRef] = {}
    manifests: list[Manifest] = []
    clock = 0.0
    for step in range(draw(st.integers(1, 12))):
        for p in partitions:
            if not draw(st.booleans()):
                continue
            clock += 1
            epoch, token = step * 10 + 9, f"{step:04x}"
            old = sorted(held.get(committed[p].object or "", frozenset()))
            reused = frozenset(n for n in old if draw(st.booleans()))
            new = frozenset(
                state_name("op", CheckpointName(p, 0, epoch, f"{b:02x}"), token)
                for b in range(draw(st.integers(0, 2)))
            )
            name = entry_name(p, 0, epoch, "dd", token)
            objects += [ObjectInfo(n, 1, clock) for n in (*new, name)]
            refs[name] = reused | new
            held[name] = reused | new
            pending[p] = EntryRef(epoch, name, "dd")
        for p in list(pending):
            if draw(st.booleans()):
                committed[p] = pending.pop(p)
        clock += 1
        entries = {f"{p}/0": (committed[p],) for p in partitions}
        manifests.append(Manifest(step, step * 10 + 9, 1, 1, "", entries))
        objects.append(ObjectInfo(manifest_name(step), 1, clock))
    retained = manifests[-draw(st.integers(1, 3)) :]
    live = {r.object for m in retained for rs in m.entries.values() for r in rs if r.object}
    live |= {r.object for r in pending.values() if r.object}
    needed = live | set().union(*(refs[n] for n in live))
    known = {n: refs[n] for n in live}
    kept_manifests = {manifest_name(m.seq) for m in retained}
    return objects, retained, known, needed | kept_manifests, {o.name for o in objects}


@given(histories())
def test_garbage_collection_keeps_what_is_needed(
    history: tuple[list[ObjectInfo], list[Manifest], dict[str, frozenset[str]], set[str], set[str]],
) -> None:
    objects, retained, references, needed, names = history
    garbage = {o.name for o in find_garbage(objects, retained, references)}
    assert not garbage & needed
    oldest = min(o.modified for o in objects if o.name == manifest_name(retained[0].seq))
    ages = {o.name: o.modified for o in objects}
    assert all(ages[n] < oldest for n in garbage)
    committed = {k: r[0].epoch for k, r in retained[-1].entries.items()}
    for name in names - garbage - needed:
        young = ages[name] >= oldest
        key = f"{'a' if '/a/' in name or '-a-' in name else 'b'}/0"
        in_progress = any(f"{e:012d}" in name for e in range(committed[key] + 1, 200))
        assert young or in_progress, f"{name} was left"


class MemoryObjects:
    """Objects in memory with a clock of their own, which may fail at the n-th deletion."""

    url = "test://"

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.now = 0.0
        self.deletions_left: int | None = None
        self.listed = 0

    def open_root(self, marker: str, data: bytes | None) -> bytes:
        return self.data.setdefault(marker, data or b"")

    def put(self, name: str, data: bytes) -> bool:
        if name in self.data:
            return False
        self.data[name], self.modified[name] = data, self.now
        return True

    def get(self, name: str) -> bytes:
        if name not in self.data:
            raise FileNotFoundError(name)
        return self.data[name]

    def exists(self, name: str) -> bool:
        return name in self.data

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        names = sorted(n for n in self.data if n.startswith(prefix) and n in self.modified)
        self.listed += len(names)
        return [ObjectInfo(n, 1, self.modified[n]) for n in names]

    def newest_number(self, stem: str, suffix: str, after: int, through: int) -> int | None:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        if self.deletions_left == 0:
            raise PermissionError("the coordinator was killed")
        if self.deletions_left is not None:
            self.deletions_left -= 1
        self.data.pop(name, None)
        self.modified.pop(name, None)

    def needed(self, retain: int) -> set[str]:
        """Manifests that are kept, and all that they refer to."""
        manifests = ManifestStore(Store(self.url, objects=self), "u")
        kept = [manifests.read(seq) for seq in manifests.seqs()[-retain:]]
        refs = {r.object for m in kept for rs in m.entries.values() for r in rs if r.object}
        return {manifest_name(m.seq) for m in kept} | refs | self.states_of(refs)

    def states_of(self, entries: Iterable[str]) -> set[str]:
        """Of those that are there."""
        manifests = ManifestStore(Store(self.url, objects=self), "u")
        found = [manifests.entry(name).objects for name in entries if f"u/{name}" in self.data]
        return {n for objects in found for names in objects.values() for n in names}

    def names(self) -> set[str]:
        return {name.removeprefix("u/") for name in self.modified}


class Saver:
    """A replica: its `SaverCore`, and its state, of which runs are reused: the n-th run of a state
    with the value v is always the same."""

    def __init__(self, partition: str, store: Store) -> None:
        self.partition = partition
        self.core = SaverCore()
        self.states = StateStore(store, "u")
        self.runs = {(n, v): Run(pa.table({"x": [v]})) for n in range(3) for v in range(3)}

    def perform(self, effects: list[SaverEffect]) -> None:
        for effect in effects:
            assert isinstance(effect, SaveState)
            state = effect.state
            operators, previous = (f"op-{self.partition}",), None
            with contextlib.suppress(ObjectMissing):
                previous = self.states.load_entry(effect.reuse) if effect.reuse else None
            ref = self.states.save(
                self.partition, 0, state.epoch, 0, operators, state.operators, previous
            )
            self.perform(self.core.entry_saved(ref, 0.0))


class History(RuleBasedStateMachine):
    """Two partitions save at their own pace, with two replicas each; entries are committed, wait,
    or are superseded by the other replica's; the coordinator is killed at any deletion, and others
    delete objects. What is needed is there after each step, but for these, and what restored tasks
    still read; what is not needed is gone at the end. Entries of which garbage collection misses
    objects are never committed, and the next save replaces them; so it is with those of which a
    commit misses objects: it looks up all that the last manifest does not need."""

    PARTITIONS = ("a", "b")
    REPLICAS = (0, 1)
    RETAIN = 2

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryObjects()
        self.store = Store(self.memory.url, objects=self.memory)
        self.savers = {(p, r): Saver(p, self.store) for p in self.PARTITIONS for r in self.REPLICAS}
        self.committed: dict[str, EntryRef] = {p: EntryRef(-1, None, "") for p in self.PARTITIONS}
        self.lost: set[str] = set()
        self.unnoticed: set[str] = set()  # those that were lost since the last listing of all
        self.trusted: dict[str, set[str]] = {}  # what committed entries needed at their commit
        self.refused_at: dict[Saver, int] = {}  # epoch at which entries of it were last refused
        self.refused: dict[Saver, EntryRef] = {}  # by a commit, while this one was committed
        self.reading: dict[str, tuple[str, State, Fetch]] = {}  # restored tasks that lack objects
        self.epoch = self.seq = 0
        self.restart()
        self.write_manifest()  # no task begins, so none saves, before the first one

    @rule()
    def restart(self) -> None:
        self.time_s = 0.0
        self.manifests = ManifestStore(self.store, "u", clock=lambda: self.time_s)
        self.unnoticed |= self.lost

    @rule(
        p=st.sampled_from(PARTITIONS),
        replica=st.sampled_from(REPLICAS),
        values=st.lists(st.integers(0, 2), max_size=3),
    )
    def save(self, p: str, replica: int, values: list[int]) -> None:
        """Few different values, so that runs are reused."""
        self.memory.now += 1
        self.epoch += 1
        saver = self.savers[p, replica]
        runs = [saver.runs[n, v] for n, v in enumerate(values)]
        state = State({f"op-{p}": of_runs(*runs)})
        saver.perform(saver.core.state_reached(TaskState(self.epoch, 0, state), 0.0))
        if self.refused.pop(saver, None) is self.committed[p]:
            assert not self.needs([saver.core.saved()[-1].object or ""]) & self.lost

    @rule(p=st.sampled_from(PARTITIONS), replica=st.sampled_from(REPLICAS))
    def reboot(self, p: str, replica: int) -> None:
        """What it has saved is never reported again."""
        self.savers[p, replica] = Saver(p, self.store)
        self.tell_savers()

    @rule(chosen=st.lists(st.tuples(st.sampled_from(PARTITIONS), st.sampled_from(REPLICAS))))
    def commit(self, chosen: list[tuple[str, int]]) -> None:
        """Often the same replica's: sinks reach its oldest entry first."""
        self.memory.now += 1
        trusted: set[str] = set().union(*self.trusted.values())
        for p, replica in chosen:
            saver = self.savers[p, replica]
            if not (reported := saver.core.saved()):
                continue
            done = reported[0]
            assert done.object is not None
            refused = self.manifests.not_committable([done.object])
            needed = self.needs([done.object])
            if needed & self.lost - trusted or not self.unnoticed:
                assert bool(refused) == bool(needed & self.lost)
            if not refused:
                self.committed[p] = EntryRef(done.epoch, done.object, done.digest)
                self.trusted[p] = needed
                trusted |= needed
            elif done.epoch > self.refused_at.get(saver, -1):
                self.refused[saver] = self.committed[p]
            self.tell_savers(refused)
        self.write_manifest()

    def write_manifest(self) -> None:
        self.seq += 1
        entries = {f"{p}/0": (ref,) for p, ref in self.committed.items()}
        assert self.manifests.write(Manifest(self.seq, self.epoch, 1, 1, "", entries))

    def tell_savers(self, refused: Iterable[str] = ()) -> None:
        known = {*refused, *self.manifests.unrestorable}
        for saver in self.savers.values():
            ref = self.committed[saver.partition]
            point = RestorePoint(epoch=ref.epoch, object=ref.object)
            saver.perform(saver.core.entry_committed(point, 0.0))
            mine = {done.object for done in saver.core.saved()} | {ref.object or ""}
            if refused_now := frozenset(known & mine):
                self.refused_at[saver] = self.epoch
                saver.perform(saver.core.entries_refused(refused_now, 0.0))

    @rule(killed_after=st.one_of(st.none(), st.integers(0, 5)))
    def collect(self, killed_after: int | None) -> None:
        self.memory.now += 1
        self.memory.deletions_left = killed_after
        try:
            in_use = {entry for entry, _, _ in self.reading.values()}
            self.manifests.collect_garbage(self.RETAIN, in_use=in_use)
        except StoreError:
            if killed_after is not None and killed_after % 2:
                self.restart()
        finally:
            self.memory.deletions_left = None
        self.tell_savers()

    @rule(p=st.sampled_from(PARTITIONS))
    def restore(self, p: str) -> None:
        """A task begins with the committed entry, and has none of its state."""
        if self.committed[p].object is None:
            self.save(p, 0, [0, 1])
            self.commit([(p, 0)])
        entry = self.committed[p].object
        if entry is not None and not self.needs([entry]) & self.lost:
            _, state, fetch = StateStore(self.store, "u").open(entry)
            self.reading[p] = entry, state, fetch

    @rule(p=st.sampled_from(PARTITIONS), replica=st.sampled_from(REPLICAS))
    def overtake(self, p: str, replica: int) -> None:
        """A task's entry leaves the manifests before it has read all."""
        self.restore(p)
        for number in range(self.RETAIN + 1):
            self.save(p, replica, [number % 3])
            self.commit([(p, replica)])
        self.collect(None)

    @rule(p=st.sampled_from(PARTITIONS), number=st.integers(0, 5))
    def fetch(self, p: str, number: int) -> None:
        """It fetches an object, or has all of them."""
        if p not in self.reading:
            return
        _, _, fetch = self.reading[p]
        if missing := fetch.unfetched:
            name = missing[number % len(missing)]
            gone = f"u/{name}" not in self.memory.data
            with pytest.raises(StateLost) if gone else contextlib.nullcontext():
                fetch.get(name)
        if not missing or fetch.lost:
            del self.reading[p]

    @rule(number=st.integers(0, 20))
    def lose(self, number: int) -> None:
        """Another program deletes what a committed entry, or one that may be committed, needs."""
        entries = [ref.object for ref in self.committed.values() if ref.object]
        entries += [d.object or "" for saver in self.savers.values() for d in saver.core.saved()]
        if names := sorted(self.needs(entries) & self.memory.names()):
            name = names[number % len(names)]
            self.memory.delete(f"u/{name}")
            self.lost.add(name)
            self.unnoticed.add(name)

    @rule()
    def full_scan(self) -> None:
        self.time_s += FULL_SCAN_S
        self.collect(None)
        self.unnoticed.clear()
        needed = {ref.object for ref in self.committed.values() if ref.object}
        saved = {d.object or "" for saver in self.savers.values() for d in saver.core.saved()}
        needed |= saved & self.memory.names()  # the commit finds others
        broken = {name for name in needed if self.needs([name]) & self.lost}
        assert broken == needed & self.manifests.unrestorable.keys()

    def needs(self, entries: Iterable[str]) -> set[str]:
        return {*entries, *self.memory.states_of(entries)}

    @invariant()
    def what_is_needed_is_there(self) -> None:
        saved = {d.object or "" for saver in self.savers.values() for d in saver.core.saved()}
        needed = self.memory.needed(self.RETAIN) | self.needs(saved)
        assert needed - self.lost <= self.memory.names()

    @invariant()
    def what_tasks_still_read_is_there(self) -> None:
        """Unless somebody has deleted its entry."""
        for entry, _, fetch in self.reading.values():
            if entry not in self.lost:
                assert set(fetch.unfetched) - self.lost <= self.memory.names()

    def teardown(self) -> None:
        """Without listing the whole store, unless the last collection failed, or entries were
        lost: nothing else knows their state."""
        self.reading.clear()
        self.full_scan()
        for p in self.PARTITIONS:
            self.reboot(p, 1)
            self.save(p, 0, [0])
            self.savers[p, 0].core._saved = deque(list(self.savers[p, 0].core.saved())[-1:])
        for _ in range(self.RETAIN + 1):
            self.commit([(p, 0) for p in self.PARTITIONS])
        self.time_s += FULL_SCAN_S if self.lost else 0
        self.collect(None)
        newest = [ref.object for ref in self.committed.values() if ref.object]
        assert len(newest) == len(self.PARTITIONS)
        assert not self.needs(newest) & self.lost
        assert self.memory.names() == self.memory.needed(self.RETAIN)


TestHistory = History.TestCase
TestHistory.settings = settings(stateful_step_count=15)


def test_state_lost_before_its_commit_is_saved_again() -> None:
    history = History()
    history.save("a", 0, [0])
    history.lose(1)
    history.what_is_needed_is_there()
    history.teardown()


def test_committed_state_that_is_lost_is_saved_again() -> None:
    history = History()
    history.save("a", 0, [0])
    history.commit([("a", 0)])
    history.lose(1)
    history.what_is_needed_is_there()
    history.teardown()


def test_the_save_after_a_refused_commit_has_all_state() -> None:
    history = History()
    history.save("a", 0, [0])
    history.save("a", 0, [0])
    history.lose(2)
    history.commit([("a", 0)])
    assert history.refused
    history.save("a", 0, [0])
    history.what_is_needed_is_there()
    history.teardown()


def test_state_lost_after_a_lost_entry_is_saved_again() -> None:
    history = History()
    history.save("a", 0, [])
    history.save("a", 0, [])
    history.lose(0)
    history.save("a", 0, [0])
    history.lose(20)
    history.what_is_needed_is_there()
    history.teardown()


class Checkpointed:
    """A partition with one committed entry of one state object, cleaned up once."""

    def __init__(self) -> None:
        self.memory, self.time_s = MemoryObjects(), 0.0
        store = Store(self.memory.url, objects=self.memory)
        self.states = StateStore(store, "u")
        self.manifests = ManifestStore(store, "u", clock=lambda: self.time_s)
        self.state = State({"op": of_runs(Run(pa.table({"x": [1]})))})
        self.entry = self.save(9, None)
        (self.object,) = self.memory.states_of([self.entry])
        assert self.manifests.not_committable([self.entry]) == {}
        assert self.manifests.write(manifest(1, 9, seg__0=EntryRef(9, self.entry, "d")))
        self.manifests.collect_garbage(retain=1)
        assert self.manifests.unrestorable == {}

    def save(self, epoch: int, previous: str | None) -> str:
        entry = self.states.load_entry(previous) if previous is not None else None
        ref = self.states.save("seg", 0, epoch, 0, ("op",), self.state, entry)
        assert ref.object is not None
        return ref.object

    def full_scan(self) -> None:
        self.time_s += FULL_SCAN_S
        self.manifests.collect_garbage(retain=1)


def test_a_full_scan_finds_missing_state_and_commits_refuse_it() -> None:
    world = Checkpointed()
    why = f"state object {world.object} is missing"
    content = world.memory.data[f"u/{world.object}"]
    world.memory.delete(f"u/{world.object}")
    world.full_scan()
    assert world.manifests.unrestorable == {world.entry: why}
    reusing = world.save(19, world.entry)
    assert world.manifests.not_committable([reusing]) == {reusing: why}
    assert world.manifests.not_committable([world.save(29, None)]) == {}
    world.memory.put(f"u/{world.object}", content)
    world.manifests.collect_garbage(retain=1)
    assert world.manifests.unrestorable == {}


def test_each_garbage_collection_finds_a_missing_entry() -> None:
    world = Checkpointed()
    world.memory.delete(f"u/{world.entry}")
    world.manifests.collect_garbage(retain=1)
    assert list(world.manifests.unrestorable) == [world.entry]


def test_a_refused_entry_makes_the_next_collection_list_all() -> None:
    world = Checkpointed()
    world.memory.delete(f"u/{world.object}")
    world.manifests.collect_garbage(retain=1)
    assert world.manifests.unrestorable == {}, "it lists no state"
    successor = ManifestStore(Store(world.memory.url, objects=world.memory), "u", lambda: 0.0)
    successor.collect_garbage(retain=1)
    assert list(successor.unrestorable) == [world.entry]
    gone = world.save(19, None)
    world.memory.delete(f"u/{gone}")
    assert list(world.manifests.not_committable([gone])) == [gone]
    world.manifests.collect_garbage(retain=1)
    assert list(world.manifests.unrestorable) == [world.entry]


class RefusedDuringCollection(Checkpointed):
    """The thread that commits finds a missing entry just before line `line` of `collect_garbage`,
    of those that are run."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self._lines_left = line
        self.memory.delete(f"u/{self.object}")
        self._gone = self.save(19, None)
        self.memory.delete(f"u/{self._gone}")
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            self.manifests.collect_garbage(retain=1)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not ManifestStore.collect_garbage.__code__:
            return None
        if event == "line":
            if self._lines_left == 0:
                self.refused = self.manifests.not_committable([self._gone])
            self._lines_left -= 1
        return self._trace


def test_an_entry_refused_during_garbage_collection_makes_one_list_all() -> None:
    missed: list[int] = []
    for line in itertools.count():
        world = RefusedDuringCollection(line)
        if not world.refused:
            break
        world.manifests.collect_garbage(retain=1)
        if list(world.manifests.unrestorable) != [world.entry]:
            missed.append(line)
    assert line > 0
    assert missed == []


def test_garbage_collection_lists_all_when_it_has_to() -> None:
    world = Checkpointed()
    world.memory.delete(f"u/{world.object}")
    world.manifests.collect_garbage(retain=1, full_scan=True)
    assert list(world.manifests.unrestorable) == [world.entry]


def test_objects_missing_in_a_listing_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Checkpointed()
    listed = world.memory.list
    monkeypatch.setattr(
        world.memory,
        "list",
        lambda prefix="": [i for i in listed(prefix) if not i.name.endswith(world.object)],
    )
    world.full_scan()
    assert world.manifests.unrestorable == {}


def test_a_damaged_entry_of_the_last_manifest_cannot_be_restored() -> None:
    world = Checkpointed()
    world.memory.data[f"u/{world.entry}"] = b'{"format": 99}'
    successor = ManifestStore(Store(world.memory.url, objects=world.memory), "u", lambda: 0.0)
    with pytest.raises(StoreError, match="format 99"):
        successor.collect_garbage(retain=1)
    assert "format 99" in successor.unrestorable[world.entry]


@pytest.mark.parametrize("reuses", ["a committed entry", "one that may be committed"])
@pytest.mark.parametrize("moment", ["it has listed objects", "it deletes"])
def test_a_save_that_ends_while_garbage_is_deleted_restores_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, moment: str, reuses: str
) -> None:
    """It took as long as the commits after which its objects are garbage; a pending entry is
    superseded by another replica's."""
    memory = MemoryObjects()
    store = Store(memory.url, objects=memory)
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    state = State({"op": of_runs(Run(pa.table({"x": [1]})))})

    def save(epoch: int, previous: Entry | None) -> str:
        memory.now += 1
        ref = states.save("seg", 0, epoch, 0, ("op",), state, previous)
        assert ref.object is not None
        return ref.object

    def commit(seq: int, name: str) -> bool:
        memory.now += 1
        if manifests.not_committable([name]):
            return False
        return manifests.write(manifest(seq, seq, seg__0=EntryRef(seq, name, "")))

    saved = [save(epoch, None) for epoch in (1, 2, 3)]
    if reuses == "a committed entry":
        assert commit(1, saved[0])
    base = states.load_entry(saved[0])  # of the long save
    assert commit(2, saved[1])
    assert commit(3, saved[2])
    committed: list[bool] = []

    def end_of_save() -> None:
        if not committed:
            committed.append(False)
            committed[0] = commit(4, save(4, base))

    list_objects, delete = memory.list, memory.delete

    def listing(prefix: str = "") -> list[ObjectInfo]:
        found = list_objects(prefix)
        if moment == "it has listed objects":
            end_of_save()
        return found

    def deleting(name: str) -> None:
        if moment == "it deletes":
            end_of_save()
        delete(name)

    monkeypatch.setattr(memory, "list", listing)
    monkeypatch.setattr(memory, "delete", deleting)
    manifests.collect_garbage(retain=2)
    assert committed == [moment == "it has listed objects"]
    newest = manifests.newest()
    assert newest is not None
    for ref in newest.entries["seg/0"]:
        assert ref.object is not None
        states.load(ref.object)


def test_garbage_collection_lists_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.checkpoints.state.OBJECT_BYTES", 0)  # an object for each run
    memory, time_s = MemoryObjects(), [0.0]
    store = Store(memory.url, objects=memory)
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u", clock=lambda: time_s[0])
    runs, previous = [Run(pa.table({"x": [n]})) for n in range(300)], None
    for seq in range(6):
        memory.now += 1
        memory.listed = 0
        runs[0] = Run(pa.table({"x": [seq]}))
        state = State({"op": of_runs(*runs)})
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), state, previous)
        assert ref.object is not None
        previous = states.load_entry(ref.object)
        assert manifests.not_committable([ref.object]) == {}
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
        manifests.collect_garbage(retain=2)
        assert (memory.listed > 300) == (seq == 0)
        time_s[0] += 10
    assert len(memory.list("u/state/")) == 301
    orphan = state_name("op", CheckpointName("seg", 0, 3, "aa"), "01")
    memory.put(f"u/{orphan}", b"")
    memory.modified[f"u/{orphan}"] = 0.0
    assert manifests.collect_garbage(retain=2) == 0
    time_s[0] += FULL_SCAN_S
    assert manifests.collect_garbage(retain=2) == 1
    assert not memory.exists(f"u/{orphan}")


def test_leftovers_of_an_interrupted_collection_are_deleted() -> None:
    memory = MemoryObjects()
    store = Store(memory.url, objects=memory)
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u", clock=lambda: 0.0)
    for seq in range(3):
        memory.now += 1
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), count_state("op", seq), None)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
        memory.deletions_left = 2 if seq == 2 else None  # a manifest and its entry
        with pytest.raises(StoreError) if seq == 2 else contextlib.nullcontext():
            manifests.collect_garbage(retain=2)
    memory.deletions_left = None
    assert manifests.collect_garbage(retain=2) == 1
    assert memory.names() == memory.needed(2)


def test_objects_with_unknown_names_are_kept() -> None:
    objects = [ObjectInfo("entries/x/0/readme", 1, 0.0), ObjectInfo("what", 1, 0.0)]
    assert find_garbage(objects, [], {}) == []
    late = [*objects, ObjectInfo(manifest_name(1), 1, 5.0)]
    assert find_garbage(late, [manifest(1)], {}) == []


def test_spilled_logs_of_replicas_that_are_gone_are_garbage() -> None:
    ref = EntryRef(9, None, "")
    logs = [
        TaskRef.of(Slot("s", 0, 0), 2),  # a later incarnation has spilled too
        TaskRef.of(Slot("s", 0, 0), 10),
        TaskRef.of(Slot("s", 0, 1), 2),  # the other replica
        TaskRef.of(Slot("gone", 0, 0), 1),
    ]
    objects = [ObjectInfo(f"{log_prefix(log)}000000000007-0a1b", 1, 1.0) for log in logs]
    late = ObjectInfo(f"{log_prefix(logs[3])}000000000008-0a1b", 1, 3.0)
    objects += [late, ObjectInfo(manifest_name(1), 1, 2.0)]
    garbage = find_garbage(objects, [manifest(1, s__0=ref)], {})
    assert [parse_log_name(o.name) for o in garbage] == [logs[3], logs[0]]
    assert late not in garbage


def test_manifests_are_deleted_before_entries_and_state() -> None:
    ref = EntryRef(500, None, "")
    saved = CheckpointName("s", 0, 9, "aa")
    objects = [
        ObjectInfo(state_name("op", saved, "01"), 1, 1.0),
        ObjectInfo(entry_name("s", 0, 9, "aa", "01"), 1, 1.0),
        ObjectInfo(manifest_name(1), 1, 2.0),
        ObjectInfo(manifest_name(9), 1, 9.0),
    ]
    names = [o.name.partition("/")[0] for o in find_garbage(objects, [manifest(9, s__0=ref)], {})]
    assert names == ["manifests", "entries", "state"]


def test_a_manifest_of_another_topology_is_refused() -> None:
    data = encode_manifest(manifest(3), "one")
    assert decode_manifest(data, "one") == decode_manifest(data) == manifest(3)
    with pytest.raises(ValueError, match="manifest belongs to topology one, not to other"):
        decode_manifest(data, "other")


def test_a_damaged_manifest_is_found() -> None:
    """A task would begin after another epoch than the state that it restores."""
    data = encode_manifest(manifest(1, s__0=EntryRef(120, "entries/x", "d")))
    damaged = data.replace(b'"epoch":120', b'"epoch":121')
    assert damaged != data
    with pytest.raises(ValueError, match="damaged: its checksum does not match"):
        decode_manifest(damaged)


def test_manifests_of_other_formats_are_read_or_refused() -> None:
    fields = json.loads(encode_manifest(manifest(3), "u"))
    del fields["checksum"]  # earlier manifests have none
    assert decode_manifest(to_json(fields), "u") == manifest(3)
    tomorrow = {**fields, "ofTomorrow": 1}
    checked = {**tomorrow, "checksum": checksum(tomorrow)}
    assert decode_manifest(to_json(checked), "u") == manifest(3)
    first = {name: value for name, value in fields.items() if name != "topology"}
    assert decode_manifest(to_json({**first, "format": 1}), "u") == manifest(3)
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"format {number}; this version reads 1 to 3"):
            decode_manifest(to_json({**fields, "format": number}), "u")
