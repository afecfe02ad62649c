"""The interface of window kinds: `check` is for validation, `windows` for the engine and drawings.

Which windows a row is in is computed by the engine, from an operator's `Windows`
(`rekindle.engine.window_assigners`).

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec
from rekindle.topology.windows.hopping import CumulativeWindows, HoppingWindows
from rekindle.topology.windows.rows import RowWindows
from rekindle.topology.windows.session import SessionWindows

START, END = "window_start", "window_end"
"""The first columns of each window operator's output; the event time of its rows is END."""

Windows = HoppingWindows | CumulativeWindows | SessionWindows | RowWindows
"""The windows of one operator, of any kind. Each type has

- `describe()`: for drawings;
- `first_complete(lacks_us)`: the start of the first window that has all its rows, if rows through
  `lacks_us` may be missing;
- `first_open(watermark_us)`: the start of the first window that the watermark does not close;
- `reach_us`: see `OperatorKind.reach_us`.
"""


class WindowKind(Protocol):
    """The fields of one kind in `window`."""

    @property
    def further_fields(self) -> tuple[str, ...]:
        """Fields of `WindowSpec` that this kind has beside its own in `registry.KINDS`."""
        ...

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        """Problems of the kind's fields."""
        ...

    def windows(self, window: WindowSpec) -> Windows:
        """The windows of a spec in which `check` finds no problem."""
        ...
