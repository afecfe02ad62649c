"""Windows of an operator that begins after the topology: those that are written have all rows.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from test_checkpoints_manifests import MemoryObjects
from window_parts import SHAPE, SLIDE, epochs, history, shape_of, table

from rekindle.checkpoints import StateStore, Store
from rekindle.engine.epochs import EPOCH
from rekindle.engine.model import State
from rekindle.engine.state.operator import (
    BEGIN_OF_PANES,
    EMPTY,
    OperatorState,
    begins_after,
)
from rekindle.engine.state.runs import PANE
from rekindle.engine.window_state import LATE, WindowShape, advance
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK


def closed(shape: WindowShape, state: OperatorState, given: list[Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for partials, watermarks in given:
        result = advance(shape, state, partials, [watermarks])
        state = result.state
        rows += result.closed.to_pylist()
    return rows


def newest_time(given: list[Any]) -> int:
    """The newest event time: the last microsecond of the newest pane with rows."""
    panes = [p for rows, _ in given for p in rows.column(PANE).to_pylist() if p != LATE]
    return max(panes, default=BEGIN_OF_PANES - SLIDE) + SLIDE - 1


@example(drawn=[([], 20), ([("a", 0, *[None] * 5), ("a", -20, *[None] * 5)], 0)], begin=1, panes=2)
@given(drawn=epochs, begin=st.integers(0, 4), panes=st.integers(1, 4))
def test_windows_of_a_new_definition_are_complete(
    drawn: list[tuple[list[Any], int]], begin: int, panes: int
) -> None:
    shape = shape_of(panes)
    all_epochs = history([*drawn, ([], 1000)], panes * SLIDE)
    missed, (first, *later) = all_epochs[:begin], all_epochs[begin:] or all_epochs[-1:]
    bound = newest_time(missed)
    number, before, after = first[1]
    read = [(first[0], (number, NO_WATERMARK, after)), *later]
    # No row is late for a definition that begins: it may write windows that were closed before.
    found = [
        row
        for row in closed(shape, begins_after(EMPTY, bound), read)
        if row[PANE] + panes * SLIDE > before
    ]
    numbers = {watermarks[0] for _, watermarks in read}
    expected = [
        row
        for row in closed(shape, EMPTY, all_epochs)
        if row[PANE] > bound and row[EPOCH] in numbers
    ]
    assert repr(found) == repr(expected)


def test_the_bound_is_saved_with_a_state_without_rows() -> None:
    memory = MemoryObjects()
    store = StateStore(Store(memory.url, objects=memory), "uid")
    state = State({"op": begins_after(EMPTY, 25)})
    ref = store.save("seg", 0, 7, 5, ["op"], state, None)
    assert ref.object is not None
    _, restored = store.load(ref.object)
    assert restored.operators["op"].first_live_pane_us == 26


def test_a_window_that_began_before_its_definition_is_not_written() -> None:
    row = ("a", 0, 0, 1, 1.0, 1, 1.0, 1.0, "z")
    whole = ("a", 30, 0, 1, 1.0, 1, 1.0, 1.0, "z")
    result = advance(
        SHAPE, begins_after(EMPTY, 25), table([row, whole]), [(0, NO_WATERMARK, END_OF_INPUT)]
    )
    assert result.closed.column(PANE).to_pylist() == [30]
