"""Histories of a window operator: epochs of partials, with late rows and watermarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from rekindle.engine.state.operator import BEGIN_OF_PANES, OperatorState
from rekindle.engine.state.reading import read
from rekindle.engine.window_assigners import HoppingAssigner
from rekindle.engine.window_state import LATE, WindowShape
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

SIZE, SLIDE = 40, 10
SHAPE = WindowShape(
    assigner=HoppingAssigner(SIZE, SLIDE),
    keys=(pa.string(),),
    partials=(
        ("p0", pa.float64(), "sum"),
        ("p1", pa.int64(), "sum"),
        ("p2", pa.float64(), "min"),
        ("p3", pa.float64(), "max"),
        ("p4", pa.string(), "max"),
    ),
)
NAMES = ("__k0", "__w", "__e", "__n", "p0", "p1", "p2", "p3", "p4")
"""Of a row of partials: its key, pane, epoch, number of input rows, and the partials."""
KINDS = dict(
    zip(
        NAMES,
        [
            *(pa.string(), pa.int64(), pa.int64(), pa.int64()),
            *(pa.float64(), pa.int64(), pa.float64(), pa.float64(), pa.string()),
        ],
        strict=True,
    )
)

doubles = st.one_of(
    st.none(), st.floats(-1e15, 1e15), st.sampled_from([math.nan, -0.0, 0.1, 1e15, -1e15, 1e-3])
)
partial = st.tuples(
    st.sampled_from(["a", "b", "c", None]),  # key
    st.integers(-3, 3).map(lambda n: n * 10),  # pane; then p0 to p4
    doubles,
    st.one_of(st.none(), st.integers(-9, 9)),
    doubles,
    doubles,
    st.one_of(st.none(), st.text(max_size=2)),
)
epochs = st.lists(
    st.tuples(st.lists(partial, max_size=6), st.integers(0, 25)), min_size=1, max_size=4
)


def table(rows: Sequence[Sequence[Any]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(NAMES)
    arrays = [
        pa.array(list(c), KINDS[n], from_pandas=False) for n, c in zip(NAMES, columns, strict=True)
    ]
    return pa.table(arrays, names=list(NAMES))


def history(
    drawn: list[tuple[list[Any], int]], size: int = SIZE
) -> list[tuple[pa.Table, tuple[int, int, int]]]:
    """Rows of each epoch, and its number with the watermarks before and after it, which increase;
    each (group, pane) once in an epoch, as from Spark."""
    result, before, after = [], NO_WATERMARK, -30
    for number, (rows, step) in enumerate(drawn):
        once = {(key, pane): (key, pane, number, 1, *rest) for key, pane, *rest in rows}
        marked = [(k, LATE if p + size <= before else p, *r) for k, p, *r in once.values()]
        after += step
        result.append((table(marked), (number, before, after)))
        before = after
    return result


def folded(state: OperatorState, shape: WindowShape = SHAPE) -> pa.Table:
    return read(shape.run_shape, state, BEGIN_OF_PANES, END_OF_INPUT)


def shape_of(panes: int) -> WindowShape:
    return replace(SHAPE, assigner=HoppingAssigner(panes * SLIDE, SLIDE))
