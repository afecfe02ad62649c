"""Windows of a number of rows of each group, one after each `slideRows` of them.

Design: docs/design/engine.md#windows-of-rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec

MAX_ROW_PANES = 1000
"""Maximum of `rows / slideRows`: so many panes of a group are in the state."""


@dataclass(frozen=True, slots=True)
class RowWindows:
    """`rows` is a multiple of `slide_rows`."""

    rows: int
    slide_rows: int

    def describe(self) -> str:
        """Such as `1000 rows every 100`."""
        slide = "" if self.rows == self.slide_rows else f" every {self.slide_rows}"
        return f"{self.rows} rows{slide}"

    def first_complete(self, lacks_us: int) -> int:
        """Rows are counted anew, so the first window has the first row that is read."""
        return lacks_us + 1

    def first_open(self, watermark_us: int) -> int:
        """The event time from which on rows are in a window that was not full. So may be earlier
        ones of groups with few rows."""
        return watermark_us

    @property
    def reach_us(self) -> int:
        return 0


class RowsKind:
    """`rows`, and `slideRows` for windows that overlap."""

    further_fields = ("slide_rows",)

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        rows, slide = window.rows, window.slide_rows
        for field, value in (("rows", rows), ("slideRows", slide)):
            if value is not None and value < 1:
                what, hint = f"{field} is {value}", "write a number of rows like 100"
                yield Problem(f"{path}.{field}", "InvalidWindow", what, hint)
                return
        if rows is None or slide is None:
            return
        if rows % slide:
            what = f"rows ({rows}) is not a multiple of slideRows ({slide})"
            hint = "write a slideRows that divides rows, or leave slideRows out"
            yield Problem(f"{path}.slideRows", "InvalidWindow", what, hint)
        elif rows // slide > MAX_ROW_PANES:
            what = f"{rows} rows every {slide}: a row is in {rows // slide:,} windows"
            hint = f"write a larger slideRows: at most {MAX_ROW_PANES:,} windows are possible"
            yield Problem(f"{path}.slideRows", "InvalidWindow", what, hint)

    def windows(self, window: WindowSpec) -> RowWindows:
        if window.rows is None:
            raise ValueError("a window of rows has a number of rows")
        return RowWindows(window.rows, window.slide_rows or window.rows)
