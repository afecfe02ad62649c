"""The state of a window without Spark: panes, closing, one call or many."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_parts import of_runs, one_run
from test_checkpoints_manifests import MemoryObjects
from window_parts import (
    SHAPE,
    SIZE,
    SLIDE,
    epochs,
    folded,
    history,
    shape_of,
    table,
)

from rekindle.checkpoints import StateStore, Store
from rekindle.engine.canonical_order import from_comparable, to_comparable
from rekindle.engine.failure import DiskFull
from rekindle.engine.model import State
from rekindle.engine.state import compaction, reading, spill
from rekindle.engine.state import panes as combining
from rekindle.engine.state.compaction import compact_all, join_single_deltas
from rekindle.engine.state.operator import EMPTY, OperatorState, match_columns
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_assigners import HoppingAssigner
from rekindle.engine.window_state import LATE, NULL_EVENT_TIME, WindowShape, advance
from rekindle.errors import StateMismatch
from rekindle.protocol import EntryRef
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK


def state_table(**columns: Any) -> pa.Table:
    values = {"__w": [0], "__h": pa.array([7], pa.uint64()), "__k0": ["a"], "p0": [1.5], "p1": [2]}
    return pa.table(values | {"p2": [0.5], "p3": [9.0], "p4": ["z"]} | columns)


def conformed(saved: pa.Table) -> pa.Table:
    (run,) = match_columns(SHAPE.run_shape, one_run(saved), "op").runs()
    return run.table


def test_saved_columns_are_matched_by_name() -> None:
    saved = state_table()
    reordered = saved.select(["p3", "p2", "__k0", "p1", "p4", "__h", "__w", "p0"])
    assert conformed(reordered) == saved


def test_compatible_saved_state_keeps_its_table() -> None:
    saved = state_table()
    assert conformed(saved) is saved


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        (
            state_table().drop_columns(["p2"]),
            "column p2 is missing in the state and double in this release",
        ),
        (state_table(p1=[1.0]), "column p1 is double in the state and int64 in this release"),
        (state_table(p9=[1]), "column p9 is int64 in the state and missing in this release"),
    ],
)
def test_incompatible_saved_state_is_refused(saved: pa.Table, reason: str) -> None:
    with pytest.raises(StateMismatch, match=f"operator op: .*{reason}"):
        conformed(saved)


def play(
    shape: WindowShape,
    steps: Sequence[tuple[pa.Table, tuple[int, int, int]]],
    sizes: Sequence[int],
    between: Callable[[OperatorState], OperatorState] = lambda state: state,
) -> tuple[str, list[str]]:
    """Digests of the last state (of its rows, and its own) and of what each epoch closes. A step:
    its rows, and its *mark*, which is the epoch with the watermarks before and after it. `between`:
    what happens to the state between calls."""
    state = EMPTY
    closed, at, turn = [], 0, 0
    while at < len(steps):
        part = steps[at : at + sizes[turn % len(sizes)]]
        step = advance(shape, state, pa.concat_tables([t for t, _ in part]), [m for _, m in part])
        state = between(step.state)
        closed.append(step.closed)
        at, turn = at + len(part), turn + 1
    rows = pa.concat_tables(closed)
    digests = [digest_table(rows.filter(pa.compute.equal(rows["__e"], e))) for e in range(9)]
    return f"{digest_table(folded(state, shape))} {state.digest}", digests


@given(
    epochs,
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([1, 4, 20, 35]),
    st.sampled_from(["nothing", "compact", "join", "spill", "restore"]),
)
def test_one_call_for_many_epochs_gives_the_same_bits(
    drawn: list[Any], sizes: list[int], panes: int, between: str
) -> None:
    """Whatever happens to the state between calls."""
    shape = shape_of(panes)
    steps = history(drawn, panes * SLIDE)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(MemoryObjects.url, objects=MemoryObjects())
        files = RunFiles(Path(directory) / "runs", memory_bytes=0)

        def changed(state: OperatorState) -> OperatorState:
            match between:
                case "compact":
                    return compact_all(shape.run_shape, state)
                case "join":
                    return join_single_deltas(shape.run_shape, state)
                case "spill":
                    return spilled(state)
                case "restore":
                    return restored(state)
            return state

        def spilled(state: OperatorState) -> OperatorState:
            moved = files.spill({"op": state})["op"]
            assert all(not run.in_memory for run in moved.runs())
            assert not list((Path(directory) / "runs").glob("*"))
            return moved

        def restored(state: OperatorState) -> OperatorState:
            states = StateStore(store, "u")
            saved = states.save(
                "s",
                0,
                epoch=9,
                watermark=0,
                operator_ids=("op",),
                state=State({"op": state}),
                previous=None,
            )
            assert saved.object is not None
            loaded = StateStore(store, "u", files).load(saved.object)[1]
            return loaded.operators.get("op", state)

        assert play(shape, steps, sizes, changed) == play(shape, steps, [1])


@given(epochs, st.integers(0, 4), st.sampled_from([1, 4, 20]))
def test_a_replica_that_was_restored_saves_a_state_of_the_same_digest(
    drawn: list[Any], at: int, panes: int
) -> None:
    """Also if all windows were closed at the checkpoint, and whatever calls it makes."""
    shape = shape_of(panes)
    steps = history(drawn, panes * SLIDE)
    before, after = steps[:at], steps[at:]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(MemoryObjects.url, objects=MemoryObjects())

        def save(states: StateStore, epoch: int, state: OperatorState) -> EntryRef:
            return states.save(
                "s",
                0,
                epoch,
                watermark=0,
                operator_ids=("op",),
                state=State({"op": join_single_deltas(SHAPE.run_shape, state)}),
                previous=None,
            )

        def run(state: OperatorState, steps: Sequence[Any], size: int) -> OperatorState:
            for begin in range(0, len(steps), size):
                part = steps[begin : begin + size]
                rows = pa.concat_tables([rows for rows, _ in part])
                state = advance(shape, state, rows, [mark for _, mark in part]).state
            return state

        one = StateStore(store, "u")
        state = run(EMPTY, before, 1)
        saved = save(one, 1, state)
        assert saved.object is not None
        other = StateStore(store, "u", RunFiles(Path(directory) / "runs"))
        restored = other.load(saved.object)[1].operators.get("op", EMPTY)
        digests = {save(one, 2, run(state, after, 1)).digest}
        digests |= {save(other, 2, run(restored, after, size)).digest for size in (1, 9)}
        assert len(digests) == 1


@given(epochs)
def test_windows_close_once_with_the_sums_of_their_panes(drawn: list[Any]) -> None:
    steps = history(drawn)
    number, before = len(steps), steps[-1][1][2]
    steps.append((table([]), (number, before, END_OF_INPUT)))
    expected: dict[Any, int] = {}
    for rows, (_, watermark_before, _) in steps:
        for row in rows.to_pylist():
            for start in range(row["__w"] - SIZE + SLIDE, row["__w"] + 1, SLIDE):
                if row["__w"] > NULL_EVENT_TIME and start + SIZE > watermark_before:
                    key = (start, row["__k0"])
                    expected[key] = expected.get(key, 0) + (row["p1"] or 0)
    got: dict[Any, int] = {}
    state = EMPTY
    for rows, mark in steps:
        step = advance(SHAPE, state, rows, [mark])
        state = step.state
        for row in step.closed.to_pylist():
            assert (row["__w"], row["__k0"]) not in got
            assert mark[1] < row["__w"] + SIZE <= mark[2]
            got[row["__w"], row["__k0"]] = row["p1"] or 0
    assert got == expected
    assert state.is_empty


@given(epochs, st.sampled_from([1, 4, 20]))
def test_windows_that_close_in_portions_have_the_same_bits(drawn: list[Any], panes: int) -> None:
    shape = shape_of(panes)
    steps = history(drawn, panes * SLIDE)
    steps.append((table([]), (len(steps), steps[-1][1][2], END_OF_INPUT)))
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(spill, "MIN_BUFFER_BYTES", 300)
        files = RunFiles(Path(directory), memory_bytes=0)
        state = portioned = EMPTY
        for rows, mark in steps:
            whole = advance(shape, state, rows, [mark])
            patched.setattr(reading, "READ_PAGES", 1)
            patched.setattr(compaction, "PAGE_ROWS", 4)
            patched.setattr(combining, "TREE_NODE_ROWS", 8)
            patched.setattr(combining, "WINDOW_ROWS", 8)
            parts = advance(shape, portioned, rows, [mark], files)
            state, portioned = whole.state, parts.state
            assert digest_table(parts.closed) == digest_table(whole.closed)
        assert state.is_empty
        assert portioned.is_empty


def test_closed_windows_larger_than_memory_are_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "MIN_BUFFER_BYTES", 50_000)
    monkeypatch.setattr(compaction, "PAGE_ROWS", 256)
    files, state = RunFiles(tmp_path, memory_bytes=0), EMPTY
    for number in range(20):
        rows = [(f"{i * 20 + number}", 0, number, 1, 1.0, i, 1.0, 1.0, "x") for i in range(500)]
        state = advance(SHAPE, state, table(rows), [(number, -100, -100)]).state
    state = files.spill({"op": state})["op"]
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    closed = advance(shape_of(1), state, None, [(20, -100, 1000)], files).closed
    assert closed.num_rows == 10_000
    assert pool.bytes_allocated() - before < 50_000 < closed.nbytes
    assert closed.column("__k0").to_pylist() == sorted(map(str, range(10_000)))


@given(epochs, st.integers(0, 5), st.sampled_from([4, 20]))
def test_a_fork_does_not_change_what_it_was_taken_from(
    drawn: list[Any], at: int, panes: int
) -> None:
    shape = shape_of(panes)
    steps = history(drawn, panes * SLIDE)
    state = EMPTY
    for rows, mark in steps[:at]:
        state = advance(shape, state, rows, [mark]).state

    def rest() -> tuple[str, list[str]]:
        found, branch = [], state
        for rows, mark in steps[at:]:
            step = advance(shape, branch, rows, [mark])
            branch = compact_all(shape.run_shape, step.state)
            found.append(digest_table(step.closed))
        return digest_table(folded(branch, shape)), found

    before = digest_table(folded(state, shape))
    assert rest() == rest()
    assert digest_table(folded(state, shape)) == before


def test_state_over_the_budget_is_in_files(tmp_path: Path) -> None:
    files, state, before = RunFiles(tmp_path, memory_bytes=20_000), EMPTY, NO_WATERMARK
    for number in range(40):
        rows = [(f"key-{number}-{i}", 0, number, 1, 1.0, 1, 1.0, 1.0, "x") for i in range(50)]
        state = advance(SHAPE, state, table(rows), [(number, before, -100)]).state
        state, before = files.spill({"op": state})["op"], -100
        assert sum(run.nbytes for run in state.runs() if run.in_memory) <= 20_000
    assert sum(run.nbytes for run in state.runs()) > 60_000
    assert folded(state).num_rows == 40 * 50
    assert not list(tmp_path.iterdir()), "files are unlinked"


def test_files_with_little_live_data_are_replaced(tmp_path: Path) -> None:
    """A small part of each file would keep all of it on the disk."""
    files = RunFiles(tmp_path, memory_bytes=10_000)
    held: list[Run] = []
    for _ in range(60):
        fresh = [Run(pa.table({"n": range(count)})) for count in (5, 5_000)]
        *held, _large = files.spill({"op": of_runs(*held, *fresh)})["op"].runs()
    assert sum(run.rows for run in held) == 60 * 5
    kept = {run.file for run in held if run.file is not None}
    assert sum(file.nbytes for file in kept) <= 100_000, "of two million"


def test_a_full_disk_is_reported_and_leaves_the_state(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rows = table([("a", 0, 0, 1, 1.0, 1, 1.0, 1.0, "x")])
    state = {"op": advance(SHAPE, EMPTY, rows, [(0, NO_WATERMARK, -100)]).state}
    with pytest.raises(DiskFull, match=r"state cannot be written to .*file/runs"):
        RunFiles(tmp_path / "file" / "runs", memory_bytes=0).spill(state)
    assert RunFiles(tmp_path, memory_bytes=0).spill(state)["op"].rows == 1


def test_an_epoch_without_rows_or_closing_windows_keeps_the_state() -> None:
    rows = table([("a", 0, 0, 1, 1.0, 1, 1.0, 1.0, "x")])
    first = advance(SHAPE, EMPTY, rows, [(0, NO_WATERMARK, -100)])
    second = advance(SHAPE, first.state, None, [(1, -100, -90)])
    assert second.state is first.state


def test_hopping_windows_keep_a_row_for_each_pane() -> None:
    """Not one for each window: a hundred times as many."""
    minute, names = 60_000_000, [f"key-{i}" for i in range(5)]
    shape = replace(SHAPE, assigner=HoppingAssigner(120 * minute, minute))
    state, before, most = EMPTY, NO_WATERMARK, 0
    one_by_one = 120  # the epochs before are taken in calls of many
    for first, end in pairwise([*range(0, one_by_one, 30), *range(one_by_one, 131)]):
        epochs = range(first, end)
        rows = [(k, e * minute, e, 1, 1.0, 1, 1.0, 1.0, "x") for e in epochs for k in names]
        afters = [e * minute for e in epochs]
        marks = list(zip(epochs, [before, *afters], afters, strict=False))
        step = advance(shape, state, table(rows), marks)
        state, before = step.state, afters[-1]
        most = max(most, state.rows)
        if first > 120:
            assert step.closed.num_rows == 5
            assert set(step.closed.column("p1").to_pylist()) == {120}
    assert most <= 1.1 * 5 * 121


def test_dropped_rows_are_counted_and_never_kept() -> None:
    rows = table(
        [
            (None, LATE, 0, 3, 1.0, 1, 1.0, 1.0, None),
            (None, NULL_EVENT_TIME, 0, 2, 1.0, 1, 1.0, 1.0, None),
        ]
    )
    step = advance(SHAPE, EMPTY, rows, [(0, NO_WATERMARK, END_OF_INPUT)])
    assert (step.late, step.null_event_time, step.closed.num_rows) == (3, 2, 0)
    assert step.state is EMPTY


@pytest.mark.parametrize("pane", [-(2**63) + 8, 2**63 - 8])
@pytest.mark.parametrize("panes", [1, 4, 40])
def test_a_time_at_the_end_of_64_bits_is_none(pane: int, panes: int) -> None:
    """Long.MIN and Long.MAX stand for "never". The ends of their windows would overflow."""
    shape = replace(SHAPE, assigner=HoppingAssigner(panes * SLIDE, SLIDE))
    rows = table([("a", p, 0, 1, 1.0, 1, 1.0, 1.0, None) for p in (0, pane - pane % SLIDE)])
    first = advance(shape, EMPTY, rows, [(0, NO_WATERMARK, 5)])
    step = advance(shape, first.state, None, [(1, 5, END_OF_INPUT)])
    assert first.null_event_time == 1
    assert first.closed.num_rows + step.closed.num_rows == panes
    assert step.state.is_empty


def test_closed_windows_come_in_the_order_of_epoch_end_and_keys() -> None:
    rows = table([(k, w, 0, 1, 1.0, 1, 1.0, 1.0, "x") for w in (10, 0) for k in (None, "b", "a")])
    marks = [(0, NO_WATERMARK, 20), (1, 20, 45)]
    closed = advance(SHAPE, EMPTY, rows, marks).closed
    assert closed.schema == SHAPE.closed_schema
    order = [(r["__e"], r["__w"], r["__k0"]) for r in closed.to_pylist()]
    bounds = sorted({(e, w) for e, w, _ in order})
    assert order == [(e, w, k) for e, w in bounds for k in ("a", "b", None)]


@pytest.mark.parametrize(("merge", "expected"), [("min", 1.0), ("max", math.nan)])
def test_nan_is_greater_than_every_number_as_in_spark(merge: str, expected: float) -> None:
    name = "p2" if merge == "min" else "p3"
    values = [math.nan, 1.0, None, math.inf]
    parts = [table([("a", 0, e, 1, 0.0, 0, v, v, "")]) for e, v in enumerate(values)]
    marks = [(e, NO_WATERMARK, NO_WATERMARK) for e in range(4)]
    state = advance(SHAPE, EMPTY, pa.concat_tables(parts), marks).state
    got = folded(state).column(name)[-1].as_py()
    assert got == expected or (math.isnan(got) and math.isnan(expected))


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=30))
def test_comparable_values_sort_as_spark_does_and_read_back(values: list[float | None]) -> None:
    array = pa.array(values, pa.float64(), from_pandas=False)
    comparable = to_comparable(array)
    assert digest_table(pa.table({"v": from_comparable(comparable)})) == digest_table(
        pa.table({"v": array})
    )
    pairs = [(b, v) for b, v in zip(comparable.to_pylist(), values, strict=True) if v is not None]
    ranked = [v for _, v in sorted(pairs, key=lambda p: p[0])]
    assert ranked == sorted(
        ranked, key=lambda v: (math.isnan(v), 0.0 if math.isnan(v) else v)
    ) or any(math.isnan(v) for v in ranked)
