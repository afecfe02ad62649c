"""Computes the columns of a generator source from their descriptions.

Every column uses a fixed number of random numbers (draws) for each row, and computes only with
integers and with IEEE sums and products, not with log or cos, so that every processor computes the
same bits. Pure: the draws come with the rows.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.topology.generator.columns import (
    Booleans,
    Choice,
    Column,
    Cycle,
    Integers,
    Keys,
    Normal,
    OrNull,
    SequenceColumn,
    Timestamps,
    Uniform,
)
from rekindle.topology.generator.constants import Value

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]


class ColumnRows(Protocol):
    """Consecutive rows of one column, with the column's own random draws."""

    def numbers(self) -> Int64s:
        """The row numbers."""

    def draws(self, label: str, per_row: int = 1) -> Uint64s:
        """Random numbers of these rows, of shape (rows, per_row), from the independent random
        stream `label`: "" for values, "null" for whether they are NULL."""

    def times(self) -> Int64s:
        """Row number / rowsPerSecond in microseconds, rounded down."""


ColumnFunction = Callable[[ColumnRows], pa.Array]


def column_function(column: Column, data_type: pa.DataType) -> ColumnFunction:
    """The function from rows to values of type `data_type`. It raises pa.ArrowException or
    OverflowError for rows whose value does not fit."""
    match column:
        case SequenceColumn(start, step):
            return lambda r: pc.cast(pa.array(_sequence(r, start, step)), data_type)
        case Timestamps(start_us, jitter_us):
            return lambda r: pc.cast(_times(r, start_us, jitter_us), data_type)
        case Integers(low, high):
            span = np.uint64(high - low + 1)
            return lambda r: pc.cast(
                pa.array((r.draws("")[:, 0] % span).astype(np.int64) + low), data_type
            )
        case Uniform(left, right):
            return lambda r: pc.cast(
                pa.array(left + (right - left) * _unit(r.draws(""))[:, 0]), data_type
            )
        case Normal(mean, sd):
            return lambda r: pc.cast(pa.array(mean + sd * _normal(r)), data_type)
        case Booleans(threshold):
            return lambda r: pc.cast(pa.array(_below(r.draws("")[:, 0], threshold)), data_type)
        case Choice(values):
            choices, size = constants(values, data_type), np.uint64(len(values))
            return lambda r: choices.take(pa.array((r.draws("")[:, 0] % size).astype(np.int64)))
        case Cycle(values):
            cycle = constants(values, data_type)
            return lambda r: cycle.take(pa.array(r.numbers() % len(cycle)))
        case Keys(prefix, count):
            return lambda r: _keys(r, prefix, count, data_type)
        case OrNull(threshold, inner):
            given, null = column_function(inner, data_type), pa.scalar(None, data_type)
            return lambda r: pc.if_else(
                pa.array(_below(r.draws("null")[:, 0], threshold)), null, given(r)
            )
        case _:
            assert_never(column)


def constants(values: tuple[Value, ...], data_type: pa.DataType) -> pa.Array:
    """Values of `rekindle.topology.generator.constants` as an array."""
    return pa.array(values, data_type)


def _sequence(rows: ColumnRows, start: int, step: int) -> Int64s:
    """NumPy computes modulo 2⁶⁴: right if the first and the last value fit."""
    numbers = rows.numbers()
    ends = [*numbers[:1].tolist(), *numbers[-1:].tolist()]
    if any(not -(2**63) <= start + i * step < 2**63 for i in ends):
        raise OverflowError("outside the range of BIGINT")
    return start + numbers * step


def _times(rows: ColumnRows, start_us: int, jitter_us: int) -> pa.Array:
    times = pc.add_checked(pa.array(rows.times()), start_us)
    if jitter_us:
        jitter = (rows.draws("")[:, 0] % np.uint64(jitter_us)).astype(np.int64)
        times = pc.subtract_checked(times, pa.array(jitter))
    return times


def _keys(rows: ColumnRows, prefix: str, count: int, data_type: pa.DataType) -> pa.Array:
    numbers = pc.cast(pa.array(rows.draws("")[:, 0] % np.uint64(count)), pa.string())
    return pc.cast(pc.binary_join_element_wise(prefix, numbers, ""), data_type)


def _unit(draws: Uint64s) -> npt.NDArray[np.float64]:
    """Uniform doubles in [0, 1): the upper 53 bits."""
    return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(rows: ColumnRows) -> npt.NDArray[np.float64]:
    """Approximately normal, with mean 0 and deviation 1: sums of 12 uniform numbers, minus 6."""
    units = _unit(rows.draws("", per_row=12))
    total = units[:, 0].copy()
    for i in range(1, 12):
        total += units[:, i]
    return total - 6.0


def _below(draws: Uint64s, threshold: int) -> npt.NDArray[np.bool_]:
    """True with the probability `threshold`, in units of 2⁻⁵³."""
    return (draws >> np.uint64(11)) < np.uint64(threshold)
