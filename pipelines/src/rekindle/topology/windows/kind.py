"""The interface of window kinds for validation, engine and drawings.

A window consists of whole panes: intervals of event time whose rows are in the same windows. Spark
aggregates rows by pane, `rekindle.engine.window_state` merges panes into windows. Event times, and
starts and ends of panes and windows, are microseconds UTC; ends are exclusive. The assignment of a
row to windows must be deterministic: no clocks, no settings.

Kinds whose windows depend on other rows (session windows, count windows) have no panes; they need
another interface.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec

Int64s = npt.NDArray[np.int64]

START, END = "window_start", "window_end"
"""The first columns of each window operator's output; the event time of its rows is END."""


class WindowAssigner(Protocol):
    """Which windows the rows of one operator are in."""

    def pane_sql(self, time: str) -> str:
        """SQL expression of the start of a row's pane; `time`: SQL of its event time."""
        ...

    def last_end_sql(self, pane: str) -> str:
        """SQL expression of the end of a pane's newest window; `pane`: SQL of the pane's start."""
        ...

    def windows_over(self, panes: Int64s) -> tuple[Int64s, Int64s]:
        """All windows of each pane, as (index of the pane, start of the window): in the order of
        the panes, for each the newest window first."""
        ...

    def ends(self, starts: Int64s) -> Int64s:
        """The ends of windows by their starts; monotonic."""
        ...

    def describe(self) -> str:
        """A short description, such as `24h every 6h`."""
        ...


class WindowKind(Protocol):
    """The fields of one kind in `window`."""

    @property
    def options(self) -> tuple[str, ...]:
        """Further fields of `WindowSpec` that this kind has."""
        ...

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        """Problems of the kind's fields."""
        ...

    def assigner(self, window: WindowSpec) -> WindowAssigner:
        """For a window without problems."""
        ...
