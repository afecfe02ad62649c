"""States in the store: what is uploaded, what is reused, and that loading returns the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_parts import of_runs, one_run, tables_of

from rekindle.backoff import BackoffPolicy
from rekindle.checkpoints import fetching
from rekindle.checkpoints import state as state_module
from rekindle.checkpoints.codec import checksum, decode_entry, encode_entry, parse_state_name
from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.run_objects import decode_runs, encode_runs
from rekindle.checkpoints.state import StateStore, merge_entries
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State, table_id
from rekindle.engine.state.operator import EMPTY
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.version import STATE_FORMAT, engine_version
from rekindle.errors import StateMismatch, StoreError
from rekindle.objects import to_json
from rekindle.streams.digest import digest_table

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("sum", pa.float64()),
        ("at", UTC),
        ("parts", pa.list_(pa.struct([("n", pa.int64()), ("x", pa.float64())]))),
    ]
)


def table(*keys: str, x: float = 1.0) -> pa.Table:
    rows = [{"key": k, "sum": x, "at": None, "parts": [{"n": 1, "x": x}, None]} for k in keys]
    return pa.Table.from_pylist(rows, SCHEMA)


def saved_names(store: Store) -> set[str]:
    return {i.name for i in store.list("u/state/")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def save(states: StateStore, epoch: int, state: State, previous: Entry | None = None) -> Any:
    return states.save("seg", 0, epoch, epoch * 10, ("op", "stateless"), state, previous)


def test_only_runs_that_are_new_since_the_committed_entry_are_uploaded(store: Store) -> None:
    states = StateStore(store, "u")
    kept = Run(table("a"))
    ref1 = save(states, 9, State({"op": of_runs(kept, Run(table("b")))}))
    entry1 = states.load_entry(ref1.object)
    before = saved_names(store)
    assert len(before) == 1, "runs are packed"
    second = State({"op": of_runs(kept, Run(table("b", "c")))})
    ref2 = save(states, 19, second, entry1)
    (new,) = saved_names(store) - before
    entry2, loaded = states.load(ref2.object)
    assert entry2.objects["op"] == (entry1.objects["op"][0], new.removeprefix("u/"))
    assert (entry2.epoch, entry2.watermark, entry2.operators) == (19, 190, ("op", "stateless"))
    assert tables_of(loaded) == tables_of(second)
    assert [b.num_rows for b in runs_of(store, new)] == [2]


def runs_of(store: Store, name: str) -> list[pa.Table]:
    return decode_runs(store.get(name))


def test_a_restored_state_is_not_uploaded_again(store: Store) -> None:
    ref = save(StateStore(store, "u"), 9, State({"op": one_run(table("a"))}))
    partner = StateStore(store, "u")
    entry, state = partner.load(ref.object)
    save(partner, 19, state, entry)
    assert len(saved_names(store)) == 1


def test_an_object_of_an_uncommitted_entry_is_never_reused(store: Store) -> None:
    states = StateStore(store, "u")
    state = State({"op": one_run(table("a"))})
    save(states, 9, state)
    save(states, 19, state, None)
    assert len(saved_names(store)) == 2


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_entries_that_are_committed_late_are_referred_to(store: Store, lag: int) -> None:
    states = StateStore(store, "u")
    runs = [Run(table(*"abcdefgh"))]
    entries: list[Entry] = []
    for number in range(12):
        runs.append(Run(table("x")))
        previous = entries[-1 - lag] if len(entries) > lag else None
        ref = save(states, number, State({"op": of_runs(*runs)}), previous)
        entries.append(states.load_entry(ref.object))
        if previous is None:
            continue
        assert set(previous.objects["op"]) <= set(entries[-1].objects["op"])
        (new,) = set(entries[-1].objects["op"]) - set(previous.objects["op"])
        assert len(runs_of(store, f"u/{new}")) == lag + 1
        loaded = StateStore(store, "u").load(ref.object)[1]
        assert tables_of(loaded) == [run.table for run in runs]


def test_of_many_uncommitted_entries_the_oldest_is_remembered(store: Store) -> None:
    states = StateStore(store, "u")
    state = State({"op": one_run(table("a"))})
    first = states.load_entry(save(states, 0, state).object)
    for number in range(1, state_module.MAX_REMEMBERED_ENTRIES + 2):
        save(states, number, state)
    assert len(states._entries) == state_module.MAX_REMEMBERED_ENTRIES
    before = saved_names(store)
    save(states, 99, state, first)
    assert saved_names(store) == before
    assert states._entries[0][0] == 0


def test_an_object_with_few_live_rows_is_written_again(store: Store) -> None:
    states = StateStore(store, "u")
    runs = [Run(table(*"abcdABCDxyz")), Run(table("e"))]
    entry = states.load_entry(save(states, 9, State({"op": of_runs(*runs)})).object)
    entry = states.load_entry(save(states, 19, State({"op": of_runs(runs[0])}), entry).object)
    assert len(saved_names(store)) == 1
    runs.append(Run(table(*"fghijk")))
    entry = states.load_entry(save(states, 29, State({"op": of_runs(*runs[1:])}), entry).object)
    assert entry.objects["op"] != ()
    assert len(entry.objects["op"]) == 1, "the first one has one live row of twelve"
    assert len(saved_names(store)) == 2


def test_dead_runs_of_an_object_are_not_restored(store: Store, tmp_path: Path) -> None:
    states = StateStore(store, "u")
    runs = [Run(table(*"abcd")), Run(table("e"))]
    entry = states.load_entry(save(states, 9, State({"op": of_runs(*runs)})).object)
    ref = save(states, 19, State({"op": of_runs(runs[1])}), entry)
    partner = StateStore(store, "u", RunFiles(tmp_path / "runs"))
    entry, state = partner.load(ref.object)
    (run,) = state.operators["op"].runs()
    assert run.table == runs[1].table
    assert run.file is not None
    assert run.file.nbytes == run.nbytes
    save(partner, 29, state, entry)
    assert len(saved_names(store)) == 1
    (facts,) = partner._object_facts.values()
    assert facts.rows == 5


def test_large_states_are_several_objects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "OBJECT_BYTES", 150)
    states = StateStore(store, "u")
    state = State({"op": of_runs(*(Run(table(key)) for key in "abcdefgh"))})
    ref = save(states, 9, state)
    assert 2 < len(saved_names(store)) < 8
    assert tables_of(StateStore(store, "u").load(ref.object)[1]) == tables_of(state)


def test_the_digest_of_an_entry_is_that_of_the_state(store: Store) -> None:
    """However it is laid out: replicas are compared by it."""
    states = [replace(one_run(table("a")), digest=digest) for digest in ("1", "1", "2")]
    states.append(replace(of_runs(Run(table("b")), Run(table("c"))), digest="1"))
    one, same, changed, laid_out = (
        save(StateStore(store, "u"), 9, State({"op": state})) for state in states
    )
    assert one.digest == same.digest == laid_out.digest != changed.digest
    assert one.object != same.object


def test_the_digest_of_a_state_without_rows_is_kept(store: Store) -> None:
    ref = save(
        StateStore(store, "u"), 9, State({"op": replace(EMPTY, digest="1", first_live_pane_us=7)})
    )
    entry, state = StateStore(store, "u").load(ref.object)
    assert (state.operators["op"].digest, state.operators["op"].first_live_pane_us) == ("1", 7)
    assert state.operators["op"].is_empty
    assert entry.objects == {"op": ()}


def test_damage_is_found_on_load(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_BACKOFF", BackoffPolicy(first_s=0.02, longest_s=0.05))
    states = StateStore(store, "u")
    ref = save(states, 9, State({"op": one_run(table("a"))}))
    (one,) = (tmp_path / "store/u/state/op").iterdir()
    save(states, 19, State({"op": one_run(table("b"))}))
    (two,) = set((tmp_path / "store/u/state/op").iterdir()) - {one}
    one.write_bytes(two.read_bytes())
    with pytest.raises(StoreError, match="is damaged: its digest does not match"):
        states.load(ref.object)
    one.write_bytes(two.read_bytes()[:50])
    with pytest.raises(StoreError, match="is damaged"):
        states.load(ref.object)


@pytest.mark.parametrize(
    ("old", "new"), [('"watermark":', '"watermark":1'), ('"bucket":[0', '"bucket":[1')]
)
def test_damage_of_an_entry_is_found_on_load(
    store: Store, tmp_path: Path, old: str, new: str
) -> None:
    states = StateStore(store, "u")
    ref = save(states, 9, State({"op": one_run(table("a"))}))
    (path,) = (tmp_path / "store/u").rglob("*.json")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(StoreError, match="is damaged: its checksum does not match"):
        states.load_entry(ref.object)


def test_an_entry_that_lacks_a_layout_is_refused(store: Store) -> None:
    states = StateStore(store, "u")
    entry = states.load_entry(save(states, 9, State({"op": one_run(table("a"))})).object)
    with pytest.raises(StoreError, match="does not describe the state of operator op"):
        states.open_state(replace(entry, layouts={}))


def test_a_stateless_chain_has_an_entry_with_its_watermark(store: Store) -> None:
    states = StateStore(store, "u")
    entry, state = states.load(save(states, 9, State()).object)
    assert entry.watermark == 90
    assert not state.operators


values = st.one_of(st.none(), st.floats(), st.sampled_from([math.nan, -0.0, math.inf]))
rows = st.fixed_dictionaries(
    {
        "key": st.none() | st.text(max_size=5),
        "sum": values,
        "at": st.none() | st.integers(-(2**50), 2**50),
        "parts": st.none()
        | st.lists(
            st.none() | st.fixed_dictionaries({"n": st.none() | st.integers(-9, 9), "x": values}),
            max_size=3,
        ),
    }
)


@given(st.lists(st.lists(rows, min_size=1, max_size=4), max_size=4), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_loaded_state_equals_saved_state(
    tmp_path: Path, content: list[list[dict[str, Any]]], mapped: bool
) -> None:
    store = Store(f"file://{tmp_path}/store")
    files = RunFiles(tmp_path / "runs") if mapped else None
    raw = SCHEMA.set(2, pa.field("at", pa.int64()))
    tables = [pa.Table.from_pylist(r, raw).cast(SCHEMA) for r in content]
    state = State({"op": of_runs(*map(Run, tables))} if tables else {})
    states = StateStore(store, "u")
    _, loaded = StateStore(store, "u", files).load(save(states, 9, state).object)
    assert loaded.operators.keys() == state.operators.keys()
    for got, t in zip(tables_of(loaded) if tables else [], tables, strict=True):
        assert got.schema == t.schema
        assert digest_table(got) == digest_table(t)
        assert repr(got.to_pylist()) == repr(t.to_pylist())


def test_entries_survive_json() -> None:
    layouts = {"a": {"pages": {"pane": [0]}, "floor": -(2**63)}}  # `first_live_pane_us`
    entry = Entry("s", 1, 9, -(2**63), ("a", "b"), {"a": ("x", "y")}, layouts=layouts)
    assert decode_entry(encode_entry(entry)) == entry
    with pytest.raises(ValueError, match="not a checkpoint entry"):
        decode_entry(b"{}")
    with pytest.raises(ValueError, match="has format 99"):
        decode_entry(b'{"format":99}')


def test_objects_of_another_topology_are_refused(store: Store) -> None:
    entry = Entry("s", 1, 9, 0, ("a",), {})
    with pytest.raises(ValueError, match="entry belongs to topology one, not to other"):
        decode_entry(encode_entry(entry, "one"), "other")
    with pytest.raises(ValueError, match="it belongs to topology one, not to other"):
        decode_runs(encode_runs([table("a")], "one"), "other")
    (same,) = decode_runs(encode_runs([table("a")], "one"), "one")
    assert same.schema.metadata is None


def test_fields_of_a_newer_release_are_ignored() -> None:
    entry = Entry("s", 1, 9, 0, ("a",), {})
    newer = {**json.loads(encode_entry(entry)), "ofTomorrow": [1]}
    del newer["checksum"]
    assert decode_entry(to_json({**newer, "checksum": checksum(newer)})) == entry


def test_a_damaged_entry_is_found() -> None:
    data = encode_entry(Entry("s", 1, 9, 0, ("a",), {}, layouts={"a": {"floor": 700}}))
    for damaged in (data.replace(b"700", b"701"), data.replace(b'"epoch":9', b'"epoch":8')):
        assert damaged != data
        with pytest.raises(ValueError, match="damaged: its checksum does not match"):
            decode_entry(damaged)


def test_an_entry_of_the_first_format_is_read() -> None:
    old = {**json.loads(encode_entry(Entry("s", 1, 9, 0, ("a",), {}))), "format": 1}
    for field in ("topology", "engine", "state_format"):
        del old[field]
    read = decode_entry(to_json(old), "u")
    assert (read.engine, read.state_format, read.epoch) == ("", 1, 9)


def test_entries_of_the_format_with_buckets_name_their_objects() -> None:
    fields = json.loads(encode_entry(Entry("s", 1, 9, 0, ("a",), {}, state_format=2)))
    del fields["layouts"]
    old = {**fields, "format": 2, "objects": {"a": {"0": "x", "63": "y"}}}
    assert decode_entry(to_json(old)).objects == {"a": ("x", "y")}


def test_state_of_another_format_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "STATE_FORMAT", 1)
    monkeypatch.setattr(state_module, "engine_version", lambda: "9+spark0")
    ref = save(StateStore(store, "u"), 9, State({"op": one_run(table("a"))}))
    empty = save(StateStore(store, "u"), 19, State({}))
    monkeypatch.undo()
    with pytest.raises(StateMismatch, match=r"state of format 1, saved by engine 9\+spark0"):
        StateStore(store, "u").load(ref.object)
    assert StateStore(store, "u").load(empty.object)[1] == State({})


def test_state_of_the_format_without_values_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "STATE_FORMAT", 3)
    ref = save(StateStore(store, "u"), 9, State({"op": one_run(table("a"))}))
    monkeypatch.undo()
    entry, state = StateStore(store, "u").load(ref.object)
    assert (entry.state_format, tables_of(state)) == (3, [table("a")])


def test_an_entry_says_which_engine_saved_it(store: Store) -> None:
    states = StateStore(store, "u")
    entry = states.load_entry(save(states, 9, State({"op": one_run(table("a"))})).object)
    assert (entry.engine, entry.state_format) == (engine_version(), STATE_FORMAT)


def test_states_of_different_formats_are_not_merged() -> None:
    first = Entry("ab", 0, 9, 90, ("a",), {"a": ("x",)}, state_format=1)
    second = Entry("cd", 0, 9, 80, ("c",), {"c": ("y",)}, state_format=2)
    with pytest.raises(ValueError, match="different state formats"):
        merge_entries([first, second], ["a", "c"])


def test_other_segments_find_the_state_of_operators() -> None:
    first = Entry("ab", 0, 9, 90, ("a", "b"), {"b": ("x",)})
    second = Entry("cd", 0, 9, 80, ("c", "d"), {"c": ("y",), "d": ("z",)})
    merged = merge_entries([first, second], ["b", "new", "c"])
    assert merged == Entry("ab+cd", 0, 9, 80, ("b", "c"), {"b": ("x",), "c": ("y",)})
    assert merge_entries([first], ["new"]) is None
    later = Entry("cd", 0, 19, 80, ("c",), {})
    assert merge_entries([first, later], ["a"]) == Entry("ab", 0, 9, 90, ("a",), {})
    with pytest.raises(ValueError, match="different epochs"):
        merge_entries([first, later], ["a", "c"])


def test_an_operator_keeps_all_of_its_tables_in_another_segment() -> None:
    tables = {table_id("b", "left"): ("x",), table_id("b", "right"): ("y",), "bb": ("z",)}
    entry = Entry("ab", 0, 9, 90, ("a", "b", "bb"), tables, layouts={t: {} for t in tables})
    merged = merge_entries([entry], ["b"])
    assert merged is not None
    assert merged.objects == {"b.left": ("x",), "b.right": ("y",)}
    assert merged.layouts.keys() == merged.objects.keys()


def test_names_contain_what_an_object_belongs_to(store: Store) -> None:
    states = StateStore(store, "u")
    ref = states.save("delays-0af1", 3, 129, 0, ("op",), State({"op": one_run(table("a"))}), None)
    assert ref.object is not None
    name = states.load_entry(ref.object).objects["op"][0]
    saved = parse_state_name(name)
    assert saved is not None
    assert (saved.key, saved.epoch) == ("delays-0af1/3", 129)
    assert parse_state_name("state/op/other.arrow") is None
