"""Windows of a fixed size, one in each `slide`: tumbling without `slide`, hopping with it.

Starts are multiples of `slide` since the Unix epoch; a pane is one slide long.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec
from rekindle.topology.units import show_duration
from rekindle.topology.windows.kind import Int64s, WindowAssigner


@dataclass(frozen=True, slots=True)
class HoppingWindows:
    """`size_us` is a multiple of `slide_us`."""

    size_us: int
    slide_us: int

    def pane_sql(self, time: str) -> str:
        return f"({time} - pmod({time}, {self.slide_us}L))"

    def last_end_sql(self, pane: str) -> str:
        return f"{pane} + {self.size_us}L"

    def windows_over(self, panes: Int64s) -> tuple[Int64s, Int64s]:
        back = np.arange(self.size_us // self.slide_us, dtype=np.int64) * self.slide_us
        which = np.repeat(np.arange(len(panes), dtype=np.int64), len(back))
        return which, (panes[:, None] - back[None, :]).ravel()

    def ends(self, starts: Int64s) -> Int64s:
        return starts + self.size_us

    def describe(self) -> str:
        size, slide = show_duration(self.size_us), show_duration(self.slide_us)
        return size if self.size_us == self.slide_us else f"{size} every {slide}"


class Hopping:
    """`size`, and `slide` for windows that overlap."""

    options = ("slide",)

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        for field, value in (("size", window.size), ("slide", window.slide)):
            if value == 0:
                what, hint = f"{field} is 0", "write a duration like 1h"
                yield Problem(f"{path}.{field}", "InvalidWindow", what, hint)
        if window.size and window.slide and window.size % window.slide:
            size, slide = show_duration(window.size), show_duration(window.slide)
            what = f"size ({size}) is not a multiple of slide ({slide})"
            hint = "write a slide that divides size, or leave slide out"
            yield Problem(f"{path}.slide", "InvalidWindow", what, hint)

    def assigner(self, window: WindowSpec) -> WindowAssigner:
        if window.size is None:
            raise ValueError("a hopping window has a size")
        return HoppingWindows(window.size, window.slide or window.size)
