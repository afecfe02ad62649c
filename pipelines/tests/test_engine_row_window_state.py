"""Windows of a number of rows without Spark: an oracle, one call or many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoints_manifests import MemoryObjects

from rekindle.checkpoints import StateStore, Store
from rekindle.engine.model import State
from rekindle.engine.row_window_state import RowWindowShape, advance
from rekindle.engine.session_state import FIRST, LAST
from rekindle.engine.state import compaction, reading
from rekindle.engine.state.compaction import compact_all, join_single_deltas
from rekindle.engine.state.operator import EMPTY, OperatorState
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import LATE, NULL_EVENT_TIME, GroupShape
from rekindle.streams.digest import digest_table

GROUPS = GroupShape(
    keys=(pa.string(),),
    partials=(
        ("p0", pa.float64(), "sum"),
        ("p1", pa.int64(), "max"),
        (FIRST, pa.int64(), "min"),
        (LAST, pa.int64(), "max"),
    ),
)
Row = tuple[str | None, int | None]
"""Key and value; its event time is its number."""
Epochs = Sequence[tuple[int, list[Row]]]
Window = tuple[int, str | None, tuple[int, ...]]
"""The epoch in which it is written, key, and event times."""

rows = st.lists(
    st.tuples(st.sampled_from(["a", "a", "b", None]), st.one_of(st.none(), st.integers(0, 5))),
    max_size=9,
)
histories = st.lists(rows, min_size=1, max_size=5)
shapes = st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 3), (3, 4), (1, 13)])


def shape_of(rows_and_panes: tuple[int, int]) -> RowWindowShape:
    return RowWindowShape(GROUPS, *rows_and_panes)


def numbered(history: Sequence[list[Row]]) -> list[tuple[int, list[tuple[int, Row]]]]:
    number, result = 0, []
    for epoch, found in enumerate(history):
        result.append((epoch, list(enumerate(found, number))))
        number += len(found)
    return result


def partials_of(epochs: Sequence[tuple[int, list[tuple[int, Row]]]]) -> pa.Table:
    """One row for each of the input, as from Spark, in any order."""
    values = [
        (key, 0, epoch, number, 1, 0.1 * number if value else 1e15 * number, value, number, number)
        for epoch, found in epochs
        for number, (key, value) in found
    ][::-1]
    names = ["__k0", "__w", "__e", "__r", "__n", "p0", "p1", FIRST, LAST]
    types = {"__k0": pa.string(), "p0": pa.float64()}
    columns = list(zip(*values, strict=True)) or [()] * len(names)
    return pa.table(
        {n: pa.array(c, types.get(n, pa.int64())) for n, c in zip(names, columns, strict=True)}
    )


def played(
    shape: RowWindowShape,
    history: Sequence[list[Row]],
    sizes: Sequence[int] = (1,),
    between: Callable[[OperatorState], OperatorState] = lambda state: state,
) -> tuple[OperatorState, pa.Table]:
    epochs, state, closed, at, turn = numbered(history), EMPTY, [], 0, 0
    while at < len(epochs):
        part = epochs[at : at + sizes[turn % len(sizes)]]
        done = advance(shape, state, partials_of(part))
        state = between(done.state)
        closed.append(done.closed)
        at, turn = at + len(part), turn + 1
    return state, pa.concat_tables(closed)


def oracle(shape: RowWindowShape, history: Sequence[list[Row]]) -> list[Any]:
    """Each window: its epoch, key, first and last time, `p1`; in the order of results."""
    written = []
    seen: dict[str | None, list[tuple[int, Row]]] = {}
    for epoch, found in numbered(history):
        for number, row in found:
            of_group = seen.setdefault(row[0], [])
            of_group.append((number, row))
            size = shape.pane_rows * shape.panes
            if len(of_group) >= size and len(of_group) % shape.pane_rows == 0:
                window = of_group[-size:]
                values = [value for _, (_, value) in window if value is not None]
                most = max(values, default=None)
                written.append((epoch, row[0], window[0][0], window[-1][0], most))
    return sorted(written, key=lambda w: (w[0], w[3]))


@given(histories, shapes)
def test_windows_equal_those_of_an_oracle(
    history: list[list[Row]], rows_and_panes: tuple[int, int]
) -> None:
    shape = shape_of(rows_and_panes)
    _, closed = played(shape, history)
    names = ["__e", "__k0", FIRST, LAST, "p1"]
    assert [tuple(r.values()) for r in closed.select(names).to_pylist()] == oracle(shape, history)


@given(
    histories,
    shapes,
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from(["nothing", "compact", "join", "spill", "restore"]),
)
def test_one_call_for_many_epochs_gives_the_same_bits(
    history: list[list[Row]], rows_and_panes: tuple[int, int], sizes: list[int], between: str
) -> None:
    """Whatever happens to the state between calls, and however many groups are read at once."""
    shape = shape_of(rows_and_panes)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        files = RunFiles(Path(directory) / "runs", memory_bytes=0)

        def changed(state: OperatorState) -> OperatorState:
            match between:
                case "compact":
                    return compact_all(shape.run_shape, state)
                case "join":
                    return join_single_deltas(shape.run_shape, state)
                case "spill":
                    return files.spill({"op": state})["op"]
                case "restore":
                    return restored(state, files)
            return state

        state, closed = played(shape, history)
        patched.setattr(reading, "GROUP_ROWS", 1)
        patched.setattr(compaction, "PAGE_ROWS", 2)
        other, found = played(shape, history, sizes, changed)
        assert digest_table(found) == digest_table(closed)
        assert other.digest == state.digest


def restored(state: OperatorState, files: RunFiles) -> OperatorState:
    store = Store(MemoryObjects.url, objects=MemoryObjects())
    saved = StateStore(store, "u").save("s", 0, 9, 0, ["op"], State({"op": state}), None)
    assert saved.object is not None
    return StateStore(store, "u", files).load(saved.object)[1].operators.get("op", state)


def test_a_group_keeps_as_many_panes_as_a_window_has() -> None:
    shape, state = shape_of((2, 3)), EMPTY
    for epoch in range(50):
        rows: list[tuple[int, Row]] = [(3 * epoch + n, ("a", n)) for n in range(3)]
        part = [(epoch, rows)]
        state = advance(shape, state, partials_of(part)).state
        state = compact_all(shape.run_shape, state)
        assert state.rows <= 3


def test_dropped_rows_are_counted_and_not_in_windows() -> None:
    rows = partials_of([(0, [(0, ("a", 1)), (1, ("a", 2)), (2, ("a", 3))])])
    panes = pa.array([0, LATE, NULL_EVENT_TIME])
    marked = rows.set_column(1, "__w", panes)
    done = advance(shape_of((1, 1)), EMPTY, marked)
    assert (done.late, done.null_event_time, done.closed.num_rows) == (1, 1, 1)
