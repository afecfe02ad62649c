"""Tables that keep their rows: what is found in them, however they are cut into runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_rows import SHAPE, SLICE, Oracle, Row, after, found_rows, rows_of, times_of
from test_checkpoints_manifests import MemoryObjects

from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State, table_id
from rekindle.engine.state import compaction, lookup
from rekindle.engine.state.compaction import compact_all, join_single_deltas
from rekindle.engine.state.keeping import numbers_of, slice_of
from rekindle.engine.state.lookup import Probes, between, find
from rekindle.engine.state.operator import BEGIN_OF_PANES, OperatorState
from rekindle.engine.state.reading import read
from rekindle.engine.state.runs import HASH, NUMBER, TIME, int64s, uint64s
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.epochs import END_OF_INPUT

KEYS = ("a", "b", "c", "d")
rows = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(-30, 60), st.integers(0, 5)), max_size=8
)
histories = st.lists(rows, min_size=1, max_size=8)
probes = st.lists(
    st.tuples(st.sampled_from((*KEYS, "e")), st.integers(-40, 70), st.integers(-3, 40)),
    min_size=1,
    max_size=6,
).map(lambda found: [(key, low, low + width) for key, low, width in found])
Epochs = list[tuple[int, Sequence[Row]]]


def epochs_of(history: Sequence[Sequence[Row]], floor: int = -1000) -> Epochs:
    live = floor - floor % SLICE
    return [(e, [row for row in found if row[1] >= live]) for e, found in enumerate(history)]


def oracle_of(epochs: Epochs) -> Oracle:
    return Oracle([(epoch, row) for epoch, found in epochs for row in found])


def content(state: OperatorState) -> object:
    return state.digest, read(SHAPE, state, BEGIN_OF_PANES, END_OF_INPUT).to_pylist()


@pytest.fixture(autouse=True, scope="module")
def _small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "PAGE_ROWS", 1)
        patch.setattr(lookup, "SHORT_ROWS", 1)
        patch.setattr(compaction, "MAX_SINGLE_DELTAS", 3)
        yield


@given(histories, probes)
def test_rows_are_found_by_key_and_time(
    history: list[list[Row]], wanted: list[tuple[str, int, int]]
) -> None:
    epochs = epochs_of(history)
    state = after([[epoch] for epoch in epochs], -1000)
    oracle = oracle_of(epochs)
    expected = [oracle.found(*probe) for probe in wanted]
    for layout in (state, compact_all(SHAPE, state), join_single_deltas(SHAPE, state)):
        assert found_rows(layout, wanted) == expected


@given(histories, st.integers(-40, 70), st.integers(0, 40))
def test_rows_are_found_by_time(history: list[list[Row]], low: int, width: int) -> None:
    epochs = epochs_of(history)
    state = after([[epoch] for epoch in epochs], -1000)
    for layout in (state, compact_all(SHAPE, state)):
        found, chosen = between(layout, SLICE, low, low + width)
        rows = found.rows(chosen) if len(chosen) else SHAPE.schema.empty_table()
        columns = zip(rows["__k0"].to_pylist(), times_of(rows), rows["v"].to_pylist(), strict=True)
        assert sorted(columns) == oracle_of(epochs).between(low, low + width)
        places = list(zip(times_of(rows), rows[NUMBER].to_pylist(), strict=True))
        assert places == sorted(places)


@given(histories, st.data())
def test_one_call_or_many_give_the_same_table(
    history: list[list[Row]], data: st.DataObject
) -> None:
    epochs = epochs_of(history)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(epochs)))))
    calls = [epochs[a:b] for a, b in zip([0, *cuts], [*cuts, len(epochs)], strict=True)]
    one, many = after([epochs], -1000), after(calls, -1000)
    assert content(one) == content(many)
    assert content(compact_all(SHAPE, one)) == content(many)
    assert content(join_single_deltas(SHAPE, many)) == content(one)


@given(histories, probes, st.integers(-30, 60))
def test_slices_that_are_too_old_are_dropped(
    history: list[list[Row]], wanted: list[tuple[str, int, int]], floor: int
) -> None:
    epochs = epochs_of(history)
    state = after([epochs], floor)
    live = floor - floor % SLICE
    oracle = oracle_of(epochs_of(history, floor))
    assert found_rows(state, wanted) == [oracle.found(*probe) for probe in wanted]
    assert all(time >= live for time in times_of(read(SHAPE, state, live, END_OF_INPUT)))


@given(histories, probes)
def test_spilled_rows_are_found(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[list[Row]],
    wanted: list[tuple[str, int, int]],
) -> None:
    files = RunFiles(tmp_path_factory.mktemp("state"), memory_bytes=1)
    epochs = epochs_of(history)
    state = after([[epoch] for epoch in epochs], -1000)
    spilled = files.spill({"op": state})["op"]
    assert not any(run.in_memory for run in spilled.runs())
    assert found_rows(spilled, wanted) == found_rows(state, wanted)
    assert content(spilled) == content(state)


@given(histories, probes)
def test_a_restored_operator_has_both_of_its_tables(
    history: list[list[Row]], wanted: list[tuple[str, int, int]]
) -> None:
    memory = MemoryObjects()
    store = StateStore(Store(memory.url, objects=memory), "uid")
    epochs = epochs_of(history)
    tables = {
        table_id("op", "left"): after([[epoch] for epoch in epochs], -1000),
        table_id("op", "right"): after([epochs[:1]], -1000),
    }
    ref = store.save("seg", 0, 7, 5, ["op"], State(tables), None)
    assert ref.object is not None
    _, restored = store.load(ref.object)
    for table, saved in tables.items():
        if saved.is_new:
            assert table not in restored.operators
            continue
        assert found_rows(restored.operators[table], wanted) == found_rows(saved, wanted)
        assert content(restored.operators[table]) == content(saved)


def test_rows_with_equal_hashes_and_other_keys_are_found_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who looks compares the keys."""
    from rekindle.engine.state import keeping

    def same(
        table: pa.Table, columns: Sequence[str]
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.full(table.num_rows, 7, dtype=np.uint64)

    monkeypatch.setattr(keeping, "hash_rows", same)
    state = after([[(0, [("a", 5, 1), ("b", 3, 2)]), (1, [("a", 4, 3)])]], -1000)
    found, chosen = between(state, SLICE, 0, 9)
    assert times_of(found.rows(chosen)) == [3, 4, 5]


def test_numbers_of_rows_begin_anew_in_each_epoch() -> None:
    numbers = numbers_of(np.array([3, 3, 3, 5, 5], dtype=np.int64))
    assert (numbers - (3 << 28)).tolist()[:3] == [0, 1, 2]
    assert (numbers - (5 << 28)).tolist()[3:] == [0, 1]


def test_a_slice_is_an_eighth_of_the_time_but_a_second() -> None:
    assert slice_of(80_000_001) == 10_000_001
    assert slice_of(0) == 1_000_000


def test_a_hot_key_costs_what_matches(tmp_path: Path) -> None:
    """Of rows with one key, those outside of the time are not looked at one by one."""
    rows = [(0, [("a", time, time % 6) for time in range(20_000)])]
    state = compact_all(SHAPE, after([rows], -1000))
    ((found,),) = [found_rows(state, [("a", 10_001, 10_003)])]
    assert [time for _, time, _ in found] == [10_001, 10_002, 10_003]
    assert rows_of([]).num_rows == 0


def test_a_row_among_many_of_its_key_and_time_is_found_by_its_number() -> None:
    epochs = [(e, [("a", 5, n % 6) for n in range(300)]) for e in range(2)]
    state = after([[epoch] for epoch in epochs], -1000)
    rows = rows_of(epochs)
    times, numbers = int64s(rows.column(TIME)), int64s(rows.column(NUMBER))
    found = find(state, SLICE, Probes(uint64s(rows.column(HASH)), times, times))
    assert found.lengths.sum() == 600 * 600
    of_each = found.with_numbers(numbers)
    assert of_each.lengths.tolist() == [1] * 600
    assert of_each.probe.tolist() == list(range(600))
    ((probe, chosen),) = of_each.portions(10_000)
    assert int64s(of_each.rows(chosen).column(NUMBER)).tolist() == numbers[probe].tolist()


def test_many_slices_cost_what_is_looked_for_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each slice only what has times in it is looked for, not all that a call looks for."""
    looked_for, find_in_pane = [0], lookup._find_in_pane

    def counted(run: Any, number: int, probes: Any, near: Any, slice_us: int) -> Any:
        looked_for[0] += len(near)
        return find_in_pane(run, number, probes, near, slice_us)

    monkeypatch.setattr(lookup, "_find_in_pane", counted)
    rows = [(KEYS[time % 4], time, time % 6) for time in range(0, 30_000, 3)]
    state = compact_all(SHAPE, after([[(0, rows)]], -1000))
    assert len(state.panes) == 3000
    wanted = [(key, time, time + 12) for key, time, _ in rows]
    found = found_rows(state, wanted, portion=5000)  # each one costs the number of runs
    assert [len(of_probe) for of_probe in found[:100]] == [2] * 100
    assert looked_for[0] < 5 * len(wanted)
