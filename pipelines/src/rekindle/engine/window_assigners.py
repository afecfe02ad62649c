"""Which panes rows are in, and which windows panes are in, for each kind of window.

A window consists of whole panes: intervals of event time whose rows are in the same windows. Spark
aggregates rows by pane, `rekindle.engine.window_state` combines panes to windows. Event times, and
starts and ends of panes and windows, are microseconds UTC; ends are exclusive. The assignment of a
row to windows must be deterministic: no clocks, no settings.

Kinds whose windows depend on other rows (session windows, count windows) have no panes; they need
another interface.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt

from rekindle.topology.windows.hopping import HoppingWindows
from rekindle.topology.windows.kind import Windows

Int64s = npt.NDArray[np.int64]


class WindowAssigner(Protocol):
    """The windows of one operator: each has `panes_per_window` panes of `pane_us` each. Panes begin
    at multiples of `pane_us` since the Unix epoch, and one window begins with each pane."""

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

    def ends(self, starts: Int64s) -> Int64s:
        """The ends of the windows with these starts; in the same order."""
        ...


@dataclass(frozen=True, slots=True)
class HoppingAssigner:
    """A pane is one slide long; `size_us` is a multiple of `slide_us`."""

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

    def ends(self, starts: Int64s) -> Int64s:
        return starts + self.size_us


def assigner_of(windows: Windows) -> WindowAssigner:
    match windows:
        case HoppingWindows(size_us, slide_us):
            return HoppingAssigner(size_us, slide_us)
        case _:
            assert_never(windows)
