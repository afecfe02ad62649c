"""Manifests: one coordinator wins, and garbage collection never deletes what is needed."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.checkpoints.codec import (
    CheckpointName,
    SpilledLogName,
    decode_manifest,
    encode_manifest,
    entry_name,
    manifest_name,
    parse_log_name,
    state_name,
)
from rekindle.checkpoints.garbage import find_garbage
from rekindle.checkpoints.manifest import EntryRef, Manifest, QueryStart
from rekindle.checkpoints.manifests import ManifestStore
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.errors import StoreError
from rekindle.objects import ObjectInfo, to_json


def manifest(seq: int, epoch: int = 9, fence: int = 1, **entries: EntryRef) -> Manifest:
    named = {key.replace("__", "/"): (ref,) for key, ref in entries.items()}
    return Manifest(seq, epoch, 1, fence, "2026-01-01T00:00:00Z", named, {"q": QueryStart(3, "id")})


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


def test_of_two_coordinators_with_the_same_number_one_commits(store: Store) -> None:
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
    for path in root.rglob("*"):
        if path.is_file():
            stat = path.stat()
            os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def test_garbage_is_collected_and_the_rest_restores(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    steady, previous, refs = pa.table({"x": [1]}), None, []
    for seq in range(6):
        age(tmp_path / "store" / "u", 100)
        state = State({"op": {0: steady, 1: pa.table({"x": [seq]})}})
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), state, previous)
        assert ref.object is not None
        previous = states.load_entry(ref.object)
        refs.append(ref)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
    pending = states.save("seg", 0, 999, 0, ("op",), State({"op": {0: steady}}), previous)
    age(tmp_path / "store" / "u" / "entries", 1000)
    age(tmp_path / "store" / "u" / "state", 1000)
    cleared = manifests.collect_garbage(retain=2)
    assert cleared.objects == 4 + 4 + 4  # manifests, entries, and their own buckets
    assert manifests.seqs() == [4, 5]
    for ref in (*refs[4:], pending):
        assert ref.object is not None
        assert states.load(ref.object)[1].buckets["op"][0].equals(steady)
        assert not manifests.unusable([ref.object])
    assert manifests.collect_garbage(retain=2).objects == 0


def test_unusable_entries_name_what_is_missing(store: Store) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    ref = states.save("s", 0, 9, 0, ("op",), State({"op": {0: pa.table({"x": [1]})}}), None)
    assert ref.object is not None
    name = states.load_entry(ref.object).objects["op"][0]
    store.delete(f"u/{name}")
    assert manifests.unusable([ref.object]) == {ref.object: f"state object {name} is missing"}


def test_an_unreadable_entry_does_not_stop_gc(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    for seq in range(3):
        tables = {"op": {0: pa.table({"x": [seq]})}}
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), State(tables), None)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
    newer = "entries/seg/0/000000000039-ab-cd.json"
    store.put(f"u/{newer}", b'{"format": 99}')
    assert "format 99" in manifests.unusable([newer])[newer]
    for part in ("entries", "state"):
        age(tmp_path / "store" / "u" / part, 1000)
    held = len(store.list("u/state/"))
    with pytest.raises(StoreError, match="format 99"):
        manifests.collect_garbage(retain=1)
    assert manifests.seqs() == [2]
    assert len(store.list("u/state/")) == held, "it is unknown what it needs"


def test_a_needed_unreadable_entry_is_kept(store: Store, tmp_path: Path) -> None:
    states, manifests = StateStore(store, "u"), ManifestStore(store, "u")
    ref = states.save("seg", 0, 9, 0, ("op",), State({"op": {0: pa.table({"x": [1]})}}), None)
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
    monkeypatch.setattr(store, "get", lambda name: read.append(name) or get(name))
    for seq in range(20):
        tables = {"op": {0: pa.table({"x": [seq]})}}
        ref = states.save("seg", 0, seq * 10 + 9, 0, ("op",), State(tables), None)
        assert manifests.write(manifest(seq, seq * 10 + 9, seg__0=ref))
        manifests.collect_garbage(retain=2)
    entries = [name for name in read if name.startswith("u/entries/")]
    assert len(entries) == len(set(entries)) == 20


@st.composite
def histories(
    draw: st.DrawFn,
) -> tuple[list[ObjectInfo], list[Manifest], dict[str, frozenset[str]], set[str], set[str]]:
    """A store after a random history: partitions save at their own pace, some saves are committed,
    some hang between saving and committing. Returns also what must stay, and what must go."""
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


def test_objects_with_unknown_names_are_kept() -> None:
    objects = [ObjectInfo("entries/x/0/readme", 1, 0.0), ObjectInfo("what", 1, 0.0)]
    assert find_garbage(objects, [], {}) == []
    late = [*objects, ObjectInfo(manifest_name(1), 1, 5.0)]
    assert find_garbage(late, [manifest(1)], {}) == []


def test_spilled_logs_of_replicas_that_are_gone_are_garbage() -> None:
    ref = EntryRef(9, None, "")
    logs = [
        SpilledLogName("s", 0, 0, 2),  # its successor spills too
        SpilledLogName("s", 0, 0, 10),
        SpilledLogName("s", 0, 1, 2),  # the other replica
        SpilledLogName("gone", 0, 0, 1),
    ]
    objects = [ObjectInfo(f"{log.prefix}000000000007-0a1b", 1, 1.0) for log in logs]
    late = ObjectInfo(f"{logs[3].prefix}000000000008-0a1b", 1, 3.0)
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


def test_manifests_of_other_formats_are_read_or_refused() -> None:
    fields = json.loads(encode_manifest(manifest(3), "u"))
    assert decode_manifest(to_json({**fields, "ofTomorrow": 1}), "u") == manifest(3)
    first = {name: value for name, value in fields.items() if name != "topology"}
    assert decode_manifest(to_json({**first, "format": 1}), "u") == manifest(3)
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"format {number}; this version reads 1 to 2"):
            decode_manifest(to_json({**fields, "format": number}), "u")
