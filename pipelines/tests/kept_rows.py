"""Tables that keep their rows, and an oracle for them: a list in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.engine.state.keeping import forget, keep, numbers_of, rows_to_keep
from rekindle.engine.state.lookup import Probes, find
from rekindle.engine.state.operator import EMPTY, OperatorState
from rekindle.engine.state.runs import TIME, RunShape, int64s
from rekindle.exchange.hashing import hash_rows

SLICE = 10
SHAPE = RunShape((pa.string(),), kept=(("v", pa.int64()), ("list", pa.list_(pa.int64()))))
Row = tuple[str, int, int]
"""Key, time, value."""


def chunked(values: Sequence[Any], kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, kind)])


def rows_of(epochs: Sequence[tuple[int, Sequence[Row]]]) -> pa.Table:
    rows = [(epoch, *row) for epoch, found in epochs for row in found]
    numbers = numbers_of(np.array([epoch for epoch, *_ in rows], dtype=np.int64))
    keys = chunked([key for _, key, _, _ in rows], pa.string())
    times = np.array([time for _, _, time, _ in rows], dtype=np.int64)
    values = [value for *_, value in rows]
    lists = chunked([[value] * (value % 3) for value in values], pa.list_(pa.int64()))
    return rows_to_keep(SHAPE, SLICE, times, numbers, [keys], [chunked(values, pa.int64()), lists])


def found_rows(
    state: OperatorState, probes: Sequence[tuple[str, int, int]], portion: int = 3
) -> list[list[Row]]:
    """For each probe (key, first and last time) the rows that `find` gives."""
    keys = pa.table({"k": pa.array([key for key, _, _ in probes], pa.string())})
    low, high = (np.array([p[at] for p in probes], dtype=np.int64) for at in (1, 2))
    found = find(state, SLICE, Probes(hash_rows(keys, ["k"]), low, high))
    result: list[list[Row]] = [[] for _ in probes]
    for probe, chosen in found.portions(portion):
        rows = found.rows(chosen)
        columns = ("__k0", TIME, "v")
        values = zip(*(rows.column(name).to_pylist() for name in columns), strict=True)
        for at, row in zip(probe.tolist(), values, strict=True):
            result[at].append(row)
    return result


@dataclass
class Oracle:
    """All rows, in the order in which they came."""

    rows: list[tuple[int, Row]] = field(default_factory=list)

    def found(self, key: str, low: int, high: int) -> list[Row]:
        matches = [(row[1], at, row) for at, (_, row) in enumerate(self.rows) if row[0] == key]
        return [row for time, _, row in sorted(matches) if low <= time <= high]

    def between(self, low: int, high: int) -> list[Row]:
        return sorted(row for _, row in self.rows if low <= row[1] <= high)


def times_of(rows: pa.Table) -> list[int]:
    found: list[int] = int64s(rows.column(TIME)).tolist()
    return found


def after(calls: Sequence[Sequence[tuple[int, Sequence[Row]]]], floor: int) -> OperatorState:
    """The state after calls of epochs."""
    state = EMPTY
    for call in calls:
        state = forget(SHAPE, keep(state, rows_of(call)), SLICE, floor)
    return state
