"""Which panes rows are in, and which windows panes are in, for each kind of window.

A window consists of whole panes: intervals of event time whose rows are in the same windows. Spark
aggregates rows by pane, `rekindle.engine.window_state` combines panes to windows. Event times, and
starts and ends of panes and windows, are microseconds UTC; ends are exclusive. The assignment of a
row to windows must be deterministic: no clocks, no settings.

Windows that depend on other rows (`rekindle.engine.operators.window_kinds`) have no assigner.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rekindle.engine.state.panes import closing_cumulative_windows, closing_windows

Int64s = npt.NDArray[np.int64]


class WindowAssigner(Protocol):
    """The windows of one operator: each has `panes_per_window` panes of `pane_us` each, at most.
    Panes begin at multiples of `pane_us` since the Unix epoch. A window is given by a time, the
    `__w` of its rows."""

    @property
    def pane_us(self) -> int: ...

    @property
    def panes_per_window(self) -> int: ...

    def pane_sql(self, time: str) -> str:
        """SQL expression of the start of a row's pane; `time`: SQL of its event time."""
        ...

    def last_end_sql(self, pane: str) -> str:
        """SQL expression of the end of a pane's newest window; `pane`: SQL of the pane's start."""
        ...

    def closing(self, panes: Int64s, before: int, after: int) -> tuple[Int64s, Int64s | None]:
        """The windows with one of `panes` (their starts, ascending) that end after `before` and not
        after `after`: the number of the first pane of each; and how many panes each has, if not
        all have `panes_per_window`."""
        ...

    def bounds(self, windows: Int64s) -> tuple[Int64s, Int64s]:
        """The starts and the ends of windows, in the same order."""
        ...

    def first_live(self, watermark: int) -> int:
        """The start of the first pane of a window that ends after the watermark, or a time after
        the pane before that."""
        ...


@dataclass(frozen=True, slots=True)
class HoppingAssigner:
    """A pane is one slide long; `size_us` is a multiple of `slide_us`. `__w` is the window's
    start."""

    size_us: int
    slide_us: int

    @property
    def pane_us(self) -> int:
        return self.slide_us

    @property
    def panes_per_window(self) -> int:
        return self.size_us // self.slide_us

    def pane_sql(self, time: str) -> str:
        return f"({time} - pmod({time}, {self.slide_us}L))"

    def last_end_sql(self, pane: str) -> str:
        return f"{pane} + {self.size_us}L"

    def closing(self, panes: Int64s, before: int, after: int) -> tuple[Int64s, None]:
        return closing_windows(panes, self.pane_us, self.panes_per_window, before, after), None

    def bounds(self, windows: Int64s) -> tuple[Int64s, Int64s]:
        return windows, windows + self.size_us

    def first_live(self, watermark: int) -> int:
        return watermark - self.size_us + 1


@dataclass(frozen=True, slots=True)
class CumulativeAssigner:
    """A pane is one step long; `size_us` is a multiple of `step_us`. Windows begin at multiples of
    the size, and one ends after each step. `__w` is the start of a window's last pane."""

    size_us: int
    step_us: int

    @property
    def pane_us(self) -> int:
        return self.step_us

    @property
    def panes_per_window(self) -> int:
        return self.size_us // self.step_us

    def pane_sql(self, time: str) -> str:
        return f"({time} - pmod({time}, {self.step_us}L))"

    def last_end_sql(self, pane: str) -> str:
        return f"{pane} - pmod({pane}, {self.size_us}L) + {self.size_us}L"

    def closing(self, panes: Int64s, before: int, after: int) -> tuple[Int64s, Int64s]:
        return closing_cumulative_windows(panes, self.pane_us, self.panes_per_window, before, after)

    def bounds(self, windows: Int64s) -> tuple[Int64s, Int64s]:
        return windows - windows % self.size_us, windows + self.step_us

    def first_live(self, watermark: int) -> int:
        return watermark - watermark % self.size_us
