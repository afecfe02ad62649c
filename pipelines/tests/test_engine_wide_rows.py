"""Rows that are wide: joins and `distinct` hold in memory what they read and write, whatever they
compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import distinct_rows
import joined_rows
import pyarrow as pa
import pytest

from rekindle.engine.operators import join as join_module
from rekindle.engine.operators.base import Advanced
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK, EpochInput

MIB = 1 << 20
_POOLS: list[pa.MemoryPool] = []
"""Buffers that come from a pool need it."""
VALUES = 1000
"""Of each row's list: 8 kB."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "PAIR_BYTES", MIB)


def peak(made: Callable[[], Advanced]) -> tuple[Advanced, int]:
    """The result, and how many bytes of Arrow's there were at once that were not there before."""
    default = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(default)
    _POOLS.append(counted)
    pa.set_memory_pool(counted)
    try:
        return made(), counted.max_memory() or 0
    finally:
        pa.set_memory_pool(default)


def wide(rows: int) -> pa.Array:
    return pa.array([list(range(VALUES))] * rows, pa.list_(pa.int64()))


def times(rows: int, at: int) -> pa.Array:
    return pa.array([at] * rows, pa.int64()).cast(pa.timestamp("us", "UTC"))


def orders(rows: int) -> pa.Table:
    columns = {"k": ["a"] * rows, "n": [1] * rows, "t": times(rows, 0), "tags": wide(rows)}
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def payments(values: list[int]) -> pa.Table:
    keys = pa.array(["a"] * len(values), pa.string())
    return pa.table({"ok": keys, "m": pa.array(values, pa.int64()), "u": times(len(values), 0)})


MORE = [(of_type, True) for of_type in ("Left", "Right", "Full", "Semi", "Anti")]


@pytest.mark.parametrize(("type", "has_more"), [*MORE, ("Semi", False), ("Anti", False)])
def test_pairs_are_made_by_their_size(type: str, has_more: bool) -> None:
    """Each of 200 rows of 8 kB is compared with each of 100: 160 MB if all are made at once."""
    join = joined_rows.operator(type)
    if not has_more:
        join = replace(join, condition=None)
    first = EpochInput(0, NO_WATERMARK, -5, (orders(200), payments([])))
    state = joined_rows.call(join, {}, [first]).tables
    then = EpochInput(1, -5, -4, (orders(0), payments([0, *[9] * 99])))
    done, size = peak(lambda: joined_rows.call(join, state, [then]))
    assert done.rows.num_rows == (0 if type == "Anti" else 200)
    assert size < 16 * MIB

    end = EpochInput(2, -4, END_OF_INPUT, (orders(0), payments([])))
    done, size = peak(lambda: joined_rows.call(join, done.tables, [end]))
    assert done.rows.num_rows == (99 if type in ("Right", "Full") else 0)
    assert size < MIB  # rows that have matched are not read again


@pytest.mark.parametrize("keep", ["First", "Last"])
def test_rows_are_compared_without_their_values(keep: str) -> None:
    """Of each of 20 keys 30 rows of 8 kB are compared with up to 16 others."""
    made: Any = replace(distinct_rows.operator(keep), within_us=1000, slice_us=125)

    def rows(at: int) -> pa.Table:
        columns = {"n": [at] * 20, "k": [f"k{n}" for n in range(20)], "d": [0.0] * 20}
        arrays = {name: pa.array(values) for name, values in columns.items()}
        return pa.table({**arrays, "t": times(20, at), "tags": wide(20)})

    epochs = [EpochInput(at, at - 101, at - 100, (rows(at),)) for at in range(30)]
    done, size = peak(lambda: distinct_rows.call(made, {}, epochs))
    assert size < 8 * sum(epoch.nbytes for epoch in epochs)
    end = EpochInput(30, -71, END_OF_INPUT, (rows(0).slice(0, 0),))
    last, size = peak(lambda: distinct_rows.call(made, dict(done.tables), [end]))
    assert done.rows.num_rows + last.rows.num_rows == 20
    assert size < 2 * MIB
