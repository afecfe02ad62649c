"""Which rows of an input an operator that keeps rows takes, and when they are. Pure.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.engine.epochs import LATE_BEFORE
from rekindle.engine.model import DroppedRows
from rekindle.engine.state.operator import BEGIN_OF_PANES, END_OF_PANES
from rekindle.engine.state.runs import Int64s, int64s
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

MAX_TIME_US = 1 << 62
"""Rows with event times beyond this have none: a bound of the rows that match them could have more
than 64 bits."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of rows in their order: their times in microseconds, and whether each is in time: it has an
    event time, which is not below the watermark before its epoch. `dropped`: the others."""

    times: Int64s
    in_time: npt.NDArray[np.bool_]
    dropped: DroppedRows


def arrivals(rows: pa.Table, time: str) -> Arrivals:
    """`rows`: with the column LATE_BEFORE; `time`: the column of their event time."""
    times = rows.column(time).cast(pa.int64())
    timed = times.is_valid().to_numpy()
    microseconds = pc.fill_null(times, 0).to_numpy()
    timed &= (microseconds > -MAX_TIME_US) & (microseconds < MAX_TIME_US)
    late = timed & (microseconds < int64s(rows.column(LATE_BEFORE)))
    dropped = DroppedRows(int(late.sum()), int((~timed).sum()))
    return Arrivals(microseconds, timed & ~late, dropped)


def reachable_from(watermark: int, reach_us: int) -> int:
    """The event time from which on rows are at most `reach_us` before one that is in time."""
    if watermark in (NO_WATERMARK, END_OF_INPUT):
        return BEGIN_OF_PANES if watermark == NO_WATERMARK else END_OF_PANES
    return max(BEGIN_OF_PANES, watermark - reach_us)
