"""What a kind of window is to validation, to the engine and to drawings.

A window is put together of whole panes: stretches of event time of which each lies in the same
windows. Spark aggregates rows by pane, `rekindle.engine.window_state` adds panes to windows. Event
times, and starts and ends of panes and windows, are microseconds UTC; ends are exclusive. The same
row must get the same windows wherever and whenever it is asked: no clocks, no settings.

Kinds whose windows depend on other rows (sessions, numbers of rows) have no panes; they need
more than this interface.

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
        """SQL of the start of a row's pane; `time` is SQL of its event time."""
        ...

    def last_end_sql(self, pane: str) -> str:
        """SQL of the end of the newest window over a pane; `pane` is SQL of the pane's start."""
        ...

    def windows_over(self, panes: Int64s) -> tuple[Int64s, Int64s]:
        """All windows over each of some panes, as (index of the pane, start of the window): panes
        in their order, and of each the newest window first."""
        ...

    def ends(self, starts: Int64s) -> Int64s:
        """The ends of windows by their starts; never falling where starts grow."""
        ...

    def describe(self) -> str:
        """In a few words, as in `24h every 6h`."""
        ...


class WindowKind(Protocol):
    """One way to write `window`."""

    @property
    def options(self) -> tuple[str, ...]:
        """Fields of `WindowSpec` that go with the one that asks for this kind."""
        ...

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        """What is wrong with the values of the kind's fields."""
        ...

    def assigner(self, window: WindowSpec) -> WindowAssigner:
        """For a window without problems."""
        ...
