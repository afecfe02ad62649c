"""Topologies with a `distinct`, histories of its input, and an oracle in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from engine_fixtures import topology
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_schema
from rekindle.engine.epochs import concatenate_epochs
from rekindle.engine.operators.base import Advanced
from rekindle.engine.operators.distinct import DistinctOperator, open_distinct
from rekindle.engine.state.operator import EMPTY, OperatorState
from rekindle.streams.epochs import NO_WATERMARK, EpochInput

WITHIN = 10
SCHEMA = "n BIGINT, k STRING, d DOUBLE, t TIMESTAMP, tags ARRAY<BIGINT>"
Row = tuple[str | None, float | None, int, int | None]
"""The keys k and d, the value n, and the event time."""
Marks = tuple[int, int, int]
"""Epoch, and the watermarks before and after it."""
History = Sequence[tuple[Sequence[Row], Marks]]


def distinct(keep: str, keys: str = "[k, d]", within: str = "10us") -> str:
    fields = f"{{keys: {keys}, within: {within}, keep: {keep}}}"
    return f"- {{name: once, inputs: [rows], distinct: {fields}}}"


def operator(keep: str) -> DistinctOperator:
    """With slices that are small."""
    compiled = topology(distinct(keep), "once", schema=SCHEMA)
    node = compiled.nodes["once"]
    schema = arrow_schema(compiled.nodes["rows"].schema)

    def analyze(text: str, views: Any) -> pa.Schema:
        raise AssertionError(text)

    return replace(open_distinct(node, compiled, [schema], analyze), slice_us=4)


rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "a", "a", "b", None]),
        st.sampled_from([0.0, 0.0, -0.0, math.nan, None]),
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(-10, 70), st.integers(-10, 70), st.integers(-10, 70)),
    ),
    max_size=8,
)
histories = st.lists(st.tuples(rows, st.integers(0, 15)), min_size=1, max_size=7)


def history(drawn: Sequence[tuple[Sequence[Row], int]]) -> History:
    before, after, epochs = NO_WATERMARK, -20, []
    for number, (of_epoch, step) in enumerate(drawn):
        after += step
        epochs.append((of_epoch, (number, before, after)))
        before = after
    return epochs


def inputs_of(found: History) -> list[EpochInput]:
    return [EpochInput(*marks, (table_of(of_epoch),)) for of_epoch, marks in found]


def table_of(found: Sequence[Row]) -> pa.Table:
    columns = {
        "n": pa.array([n for _, _, n, _ in found], pa.int64()),
        "k": pa.array([k for k, _, _, _ in found], pa.string()),
        "d": pa.array([d for _, d, _, _ in found], pa.float64(), from_pandas=False),
        "t": pa.array([t for _, _, _, t in found], pa.int64()).cast(pa.timestamp("us", "UTC")),
        "tags": pa.array([[n] * (n % 3) for _, _, n, _ in found], pa.list_(pa.int64())),
    }
    return pa.table(columns)


def call(
    made: DistinctOperator, tables: dict[str, OperatorState], epochs: Sequence[EpochInput]
) -> Advanced:
    schema = epochs[0].inputs[0].schema
    table = concatenate_epochs(schema, [(e, e.inputs[0]) for e in epochs])
    clock = [(e.epoch, e.watermark_before, e.watermark) for e in epochs]
    states = {name: tables.get(name, EMPTY) for name in made.tables}

    def evaluate(text: str, views: Any) -> pa.Table:
        raise AssertionError(text)

    return made.advance(states, [table if table.num_rows else None], clock, None, evaluate)


def oracle(found: History, keep: str) -> tuple[list[tuple[int, Row]], int, int]:
    """The rows that are written with their epoch, in their order; numbers of late rows, and of rows
    without event time."""
    live: list[tuple[int, int, Row]] = []
    late = untimed = 0
    for of_epoch, (number, before, _) in found:
        for place, row in enumerate(of_epoch):
            if row[3] is None:
                untimed += 1
            elif row[3] < before:
                late += 1
            else:
                live.append((number, place, row))
    rows = _first(live) if keep == "First" else _last(live, found)
    return rows, late, untimed


def _first(live: Sequence[tuple[int, int, Row]]) -> list[tuple[int, Row]]:
    written: list[tuple[int, Row]] = []
    for number, _, row in live:
        if not any(
            _key(row) == _key(w) and abs(_time(row) - _time(w)) < WITHIN for _, w in written
        ):
            written.append((number, row))
    return written


def _last(live: Sequence[tuple[int, int, Row]], found: History) -> list[tuple[int, Row]]:
    written = []
    for number, place, row in live:
        later = any(
            _key(row) == _key(other)
            and (_time(row), number, place) < (_time(other), *at)
            and _time(other) < _time(row) + WITHIN
            for *at, other in live
        )
        closes = [e for _, (e, _, after) in found if after >= _time(row) + WITHIN]
        if not later and closes:
            written.append((closes[0], _time(row), number, place, row))
    return [(epoch, row) for epoch, _, _, _, row in sorted(written, key=lambda w: w[:4])]


def _time(row: Row) -> int:
    assert row[3] is not None
    return row[3]


def _key(row: Row) -> tuple[str | None, float | str | None]:
    k, d, _, _ = row
    return k, "NaN" if d is not None and math.isnan(d) else d
