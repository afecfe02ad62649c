"""Histories of session windows, what Spark makes of them, and an oracle in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from rekindle.engine.session_state import FIRST, LAST
from rekindle.engine.window_state import GroupShape
from rekindle.streams.epochs import NO_WATERMARK

GAP = 10
SHAPE = GroupShape(
    keys=(pa.string(),),
    partials=(
        ("p0", pa.float64(), "sum"),
        ("p1", pa.int64(), "sum"),
        (FIRST, pa.int64(), "min"),
        (LAST, pa.int64(), "max"),
    ),
)
Row = tuple[str | None, int, float]
"""Key, event time, value."""
Mark = tuple[int, int, int]
"""An epoch, and the watermarks before and after it."""
Session = tuple[int, str | None, int, int, int]
"""The epoch in which it is written, key, start, end, number of rows."""

rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.integers(-25, 45),
        st.sampled_from([0.1, 1e15, -1e15, 1e-3, 3.0]),
    ),
    max_size=6,
)
histories = st.lists(st.tuples(rows, st.integers(0, 20)), min_size=1, max_size=5)


def epochs_of(drawn: Sequence[tuple[list[Row], int]]) -> list[tuple[list[Row], Mark]]:
    """Each epoch's rows, with watermarks that increase by the numbers drawn."""
    result, before, after = [], NO_WATERMARK, -20
    for number, (found, step) in enumerate(drawn):
        after += step
        result.append((found, (number, before, after)))
        before = after
    return result


def partials_of(epochs: Sequence[tuple[list[Row], Mark]], gap: int = GAP) -> pa.Table:
    """One row for each group and pane of an epoch, as Spark aggregates them."""
    groups: dict[tuple[int, str | None, int], list[tuple[int, float]]] = {}
    for found, (epoch, _, _) in epochs:
        for key, time, value in found:
            groups.setdefault((epoch, key, time - time % gap), []).append((time, value))
    columns: dict[str, list[Any]] = {
        "__k0": [],
        "__w": [],
        "__e": [],
        "__n": [],
        "p0": [],
        "p1": [],
    }
    columns |= {FIRST: [], LAST: []}
    for (epoch, key, pane), members in groups.items():
        total = 0.0
        for _, value in members:
            total += value
        times = [time for time, _ in members]
        values = (key, pane, epoch, len(members), total, len(members), min(times), max(times))
        for column, item in zip(columns.values(), values, strict=True):
            column.append(item)
    floats, texts = {"p0": pa.float64()}, {"__k0": pa.string()}
    types = floats | texts
    return pa.table({n: pa.array(c, types.get(n, pa.int64())) for n, c in columns.items()})


def oracle(epochs: Sequence[tuple[list[Row], Mark]]) -> tuple[list[Session], int]:
    """The sessions in the order in which they are written, and how many rows are late."""
    written: list[Session] = []
    late = 0
    open_times: dict[str | None, list[int]] = {}
    for found, (epoch, before, after) in epochs:
        for key, time, _ in found:
            open_times.setdefault(key, []).append(time)
        for key, times in open_times.items():
            remaining: list[int] = []
            for session in _chains(times):
                end = session[-1] + GAP
                if end <= before:
                    late += len(session)
                elif end <= after:
                    written.append((epoch, key, session[0], end, len(session)))
                else:
                    remaining += session
            open_times[key] = remaining
    return sorted(written, key=lambda s: (s[0], s[3], s[1] is None, s[1] or "")), late


def _chains(times: Sequence[int]) -> list[list[int]]:
    chains: list[list[int]] = []
    for time in sorted(times):
        if chains and time - chains[-1][-1] < GAP:
            chains[-1].append(time)
        else:
            chains.append([time])
    return chains


def sessions_of(closed: pa.Table) -> list[Session]:
    rows = closed.select(["__e", "__k0", FIRST, LAST, "p1"]).to_pylist()
    return [(r["__e"], r["__k0"], r[FIRST], r[LAST] + GAP, r["p1"]) for r in rows]
