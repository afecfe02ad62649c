"""Windows with `step` without Spark: an oracle, late rows, one call or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_parts import SHAPE, SLIDE, epochs, history, table

from rekindle.engine.state.compaction import compact_all
from rekindle.engine.state.operator import EMPTY, OperatorState, begins_after
from rekindle.engine.state.panes import closing_cumulative_windows
from rekindle.engine.window_assigners import CumulativeAssigner
from rekindle.engine.window_state import LATE, WindowShape, advance
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

Steps = list[tuple[pa.Table, tuple[int, int, int]]]
Sums = dict[tuple[int, int, int, Any], int]
"""By epoch, start, end and key."""
panes_of_a_window = st.sampled_from([1, 3, 20])


def shape_of(panes: int) -> WindowShape:
    return replace(SHAPE, assigner=CumulativeAssigner(panes * SLIDE, SLIDE))


def steps_of(drawn: list[Any], panes: int) -> Steps:
    """The epochs drawn, and one that closes all windows."""
    size, steps = panes * SLIDE, []
    for rows, mark in history([*drawn, ([], 10_000)], size=10**9):
        starts = rows.column("__w").to_numpy()
        late = starts - starts % size + size <= mark[1]
        marked = pa.array(np.where(late, LATE, starts))
        steps.append((rows.set_column(1, "__w", marked), mark))
    return steps


def played(shape: WindowShape, steps: Steps, sizes: Sequence[int], state: OperatorState) -> Any:
    closed, at, turn = [], 0, 0
    while at < len(steps):
        part = steps[at : at + sizes[turn % len(sizes)]]
        rows = pa.concat_tables([rows for rows, _ in part])
        done = advance(shape, state, rows, [mark for _, mark in part])
        state = compact_all(shape.run_shape, done.state) if turn % 2 else done.state
        closed.append(done.closed)
        at, turn = at + len(part), turn + 1
    return state, pa.concat_tables(closed)


def sums_of(shape: WindowShape, closed: pa.Table) -> Sums:
    starts, ends = shape.assigner.bounds(closed.column("__w").to_numpy())
    columns = (closed.column("__e").to_pylist(), starts.tolist(), ends.tolist())
    keys, sums = closed.column("__k0").to_pylist(), closed.column("p1").to_pylist()
    groups = zip(*columns, keys, strict=True)
    found = {group: total or 0 for group, total in zip(groups, sums, strict=True)}
    assert len(found) == closed.num_rows
    return found


def oracle(steps: Steps, panes: int) -> Sums:
    size = panes * SLIDE
    written: Sums = {}
    rows: list[dict[str, Any]] = []
    for table_of_epoch, (epoch, before, after) in steps:
        rows += table_of_epoch.to_pylist()
        for begin in {r["__w"] - r["__w"] % size for r in rows if r["__w"] != LATE}:
            for end in range(begin + SLIDE, begin + size + SLIDE, SLIDE):
                if before < end <= after:
                    for row in rows:
                        if begin <= row["__w"] < end:
                            group = (epoch, begin, end, row["__k0"])
                            written[group] = written.get(group, 0) + (row["p1"] or 0)
    return written


@given(epochs, panes_of_a_window)
def test_windows_equal_those_of_an_oracle(drawn: list[Any], panes: int) -> None:
    """One ends after each step, with all rows since its start, and late ones in the later ends."""
    shape, steps = shape_of(panes), steps_of(drawn, panes)
    state, closed = played(shape, steps, [1], EMPTY)
    assert sums_of(shape, closed) == oracle(steps, panes)
    assert state.is_empty


@given(epochs, panes_of_a_window, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_one_call_for_many_epochs_gives_the_same_bits(
    drawn: list[Any], panes: int, sizes: list[int]
) -> None:
    shape, steps = shape_of(panes), steps_of(drawn, panes)
    state, closed = played(shape, steps, [1], EMPTY)
    other, found = played(shape, steps, sizes, EMPTY)
    assert (digest_table(found), other.digest) == (digest_table(closed), state.digest)


@given(epochs, panes_of_a_window, st.integers(-50, 40))
def test_only_windows_that_begin_with_their_operator_are_written(
    drawn: list[Any], panes: int, lacks_us: int
) -> None:
    shape, steps = shape_of(panes), steps_of(drawn, panes)
    _, closed = played(shape, steps, [2], begins_after(EMPTY, lacks_us))
    every = oracle(steps, panes)
    assert sums_of(shape, closed) == {w: n for w, n in every.items() if w[1] > lacks_us}


def test_windows_end_in_the_order_of_their_steps() -> None:
    shape = shape_of(3)
    rows = table([("a", 0, 0, 1, 1.0, 1, 1.0, 1.0, "x"), ("a", 20, 0, 1, 1.0, 1, 1.0, 1.0, "x")])
    closed = advance(shape, EMPTY, rows, [(0, NO_WATERMARK, END_OF_INPUT)]).closed
    bounds = [column.tolist() for column in shape.assigner.bounds(closed["__w"].to_numpy())]
    assert bounds == [[0, 0, 0], [10, 20, 30]]
    assert closed.column("p1").to_pylist() == [1, 1, 2]


@pytest.mark.parametrize(("before", "after"), [(-(2**63), 2**63 - 1), (45, 120), (0, 0)])
def test_each_end_between_two_watermarks_is_found(before: int, after: int) -> None:
    panes = np.array([-10, 0, 50, 60], dtype=np.int64)
    firsts, counts = closing_cumulative_windows(panes, 10, 6, before, after)
    expected = [
        (begin, count)
        for begin, first in ((-6, -1), (0, 0), (6, 6))
        for count in range(1, 7)
        if begin + count > first and before < (begin + count) * 10 <= after
    ]
    assert list(zip(firsts.tolist(), counts.tolist(), strict=True)) == expected
