"""How each kind of windows is computed: which partials it needs beside those of the aggregates, in
which pane Spark aggregates a row, and its state. A new kind is a class here, and a case in
`computation_of`.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, assert_never

import pyarrow as pa

from rekindle.engine import row_window_state, session_state, window_state
from rekindle.engine.epochs import LATE_BEFORE, Clock
from rekindle.engine.operators.base import LACKS, LACKS_SHAPE, ONLY_TABLE, lacks_us
from rekindle.engine.row_window_state import RowWindowShape
from rekindle.engine.session_state import FIRST, LAST
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import PANE, Int64s, RunShape, int64s
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_assigners import CumulativeAssigner, HoppingAssigner, WindowAssigner
from rekindle.engine.window_state import (
    LATE,
    NULL_EVENT_TIME,
    AdvanceResult,
    GroupShape,
    WindowShape,
)
from rekindle.topology.sql.aggregates import Partial
from rekindle.topology.windows.hopping import CumulativeWindows, HoppingWindows
from rekindle.topology.windows.kind import Windows
from rekindle.topology.windows.rows import RowWindows
from rekindle.topology.windows.session import SessionWindows

ROW_TIME = "__time"
"""Column of a row's event time in microseconds, for partials of kinds."""
Tables = Mapping[str, OperatorState]


class WindowComputation(Protocol):
    @property
    def partials(self) -> tuple[Partial, ...]:
        """Partials of ROW_TIME. Without any, windows consist of panes, and an event time that is
        the end of a window counts as 1 µs less: it is in the panes of that window."""
        ...

    @property
    def is_by_row(self) -> bool:
        """Whether Spark computes partials of each row, with ROW_ORDER, not of groups."""
        ...

    def pane_sql(self, time: str) -> str:
        """SQL of a row's pane, or LATE or NULL_EVENT_TIME; `time`: SQL of its event time."""
        ...

    def tables(self, shape: GroupShape) -> Mapping[str, RunShape]: ...

    def advance(
        self,
        shape: GroupShape,
        tables: Tables,
        partials: pa.Table | None,
        clock: Clock,
        files: RunFiles | None,
    ) -> tuple[AdvanceResult, Tables]:
        """The result, with the state of ONLY_TABLE; and the other tables."""
        ...

    def bounds(self, rows: pa.Table) -> tuple[Int64s, Int64s]:
        """The starts and the ends of closed windows."""
        ...


_BOUNDS = (
    Partial(FIRST, f"min({ROW_TIME})", "min"),
    Partial(LAST, f"max({ROW_TIME})", "max"),
)


@dataclass(frozen=True, slots=True)
class ByPanes:
    """A row gets LATE if it is late for the newest window of its pane. An end beyond 64 bits wraps
    to before the pane: such a row is not late, and `rekindle.engine.window_state` counts it as
    untimed."""

    assigner: WindowAssigner
    partials: tuple[Partial, ...] = ()
    is_by_row = False

    def pane_sql(self, time: str) -> str:
        pane = self.assigner.pane_sql(time)
        last_end = self.assigner.last_end_sql(pane)
        return (
            f"CASE WHEN {time} IS NULL THEN {NULL_EVENT_TIME}L"
            f" WHEN {last_end} BETWEEN {pane} AND {LATE_BEFORE} THEN {LATE}L ELSE {pane} END"
        )

    def tables(self, shape: GroupShape) -> Mapping[str, RunShape]:
        return {ONLY_TABLE: shape.run_shape}

    def advance(
        self,
        shape: GroupShape,
        tables: Tables,
        partials: pa.Table | None,
        clock: Clock,
        files: RunFiles | None,
    ) -> tuple[AdvanceResult, Tables]:
        of_panes = WindowShape(shape.keys, shape.partials, shape.wide_sums, assigner=self.assigner)
        return window_state.advance(of_panes, tables[ONLY_TABLE], partials, clock, files), {}

    def bounds(self, rows: pa.Table) -> tuple[Int64s, Int64s]:
        return self.assigner.bounds(int64s(rows.column(PANE)))


@dataclass(frozen=True, slots=True)
class BySessions:
    """Which rows are late follows from the state."""

    gap_us: int
    partials = _BOUNDS
    is_by_row = False

    def pane_sql(self, time: str) -> str:
        pane = f"({time} - pmod({time}, {self.gap_us}L))"
        return f"CASE WHEN {time} IS NULL THEN {NULL_EVENT_TIME}L ELSE {pane} END"

    def tables(self, shape: GroupShape) -> Mapping[str, RunShape]:
        return {ONLY_TABLE: shape.run_shape, LACKS: LACKS_SHAPE}

    def advance(
        self,
        shape: GroupShape,
        tables: Tables,
        partials: pa.Table | None,
        clock: Clock,
        files: RunFiles | None,
    ) -> tuple[AdvanceResult, Tables]:
        done = session_state.advance(
            shape, self.gap_us, tables[ONLY_TABLE], lacks_us(tables), partials, clock, files
        )
        return done, {LACKS: tables[LACKS]}

    def bounds(self, rows: pa.Table) -> tuple[Int64s, Int64s]:
        return int64s(rows.column(FIRST)), int64s(rows.column(LAST)) + self.gap_us


@dataclass(frozen=True, slots=True)
class ByRows:
    """A row is late if its event time is below the watermark before its epoch: so windows behind it
    get each result in time, since its last row is not late."""

    rows: int
    slide_rows: int
    partials = _BOUNDS
    is_by_row = True

    def pane_sql(self, time: str) -> str:
        return (
            f"CASE WHEN {time} IS NULL THEN {NULL_EVENT_TIME}L"
            f" WHEN {time} < {LATE_BEFORE} THEN {LATE}L ELSE 0L END"
        )

    def tables(self, shape: GroupShape) -> Mapping[str, RunShape]:
        return {ONLY_TABLE: self._shape(shape).run_shape}

    def _shape(self, shape: GroupShape) -> RowWindowShape:
        return RowWindowShape(shape, self.slide_rows, self.rows // self.slide_rows)

    def advance(
        self,
        shape: GroupShape,
        tables: Tables,
        partials: pa.Table | None,
        clock: Clock,
        files: RunFiles | None,
    ) -> tuple[AdvanceResult, Tables]:
        state = tables[ONLY_TABLE]
        return row_window_state.advance(self._shape(shape), state, partials, files), {}

    def bounds(self, rows: pa.Table) -> tuple[Int64s, Int64s]:
        return int64s(rows.column(FIRST)), int64s(rows.column(LAST))


def computation_of(windows: Windows) -> WindowComputation:
    match windows:
        case HoppingWindows(size_us, slide_us):
            return ByPanes(HoppingAssigner(size_us, slide_us))
        case CumulativeWindows(size_us, step_us):
            return ByPanes(CumulativeAssigner(size_us, step_us))
        case SessionWindows(gap_us):
            return BySessions(gap_us)
        case RowWindows(rows, slide_rows):
            return ByRows(rows, slide_rows)
        case _:
            assert_never(windows)
