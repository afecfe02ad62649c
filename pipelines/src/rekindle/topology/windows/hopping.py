"""Windows of a fixed size, one in each `slide`: tumbling without `slide`, hopping with it.

Starts are multiples of `slide` since the Unix epoch; a pane is one slide long.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec
from rekindle.topology.units import format_duration

MAX_PANES = 100_000
"""Maximum of `size / slide`; a window of a day with a slide of a second has 86,400. After a gap in
the input, and at its end, all the windows of a row close in one epoch."""


@dataclass(frozen=True, slots=True)
class HoppingWindows:
    """`size_us` is a multiple of `slide_us`."""

    size_us: int
    slide_us: int

    def describe(self) -> str:
        """Such as `24h every 6h`."""
        size, slide = format_duration(self.size_us), format_duration(self.slide_us)
        return size if self.size_us == self.slide_us else f"{size} every {slide}"


class HoppingKind:
    """`size`, and `slide` for windows that overlap."""

    further_fields = ("slide",)

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        for field, value in (("size", window.size), ("slide", window.slide)):
            if value == 0:
                what, hint = f"{field} is 0", "write a duration like 1h"
                yield Problem(f"{path}.{field}", "InvalidWindow", what, hint)
        if window.size and window.slide and window.size % window.slide:
            size, slide = format_duration(window.size), format_duration(window.slide)
            what = f"size ({size}) is not a multiple of slide ({slide})"
            hint = "write a slide that divides size, or leave slide out"
            yield Problem(f"{path}.slide", "InvalidWindow", what, hint)
        elif window.size and window.slide and window.size // window.slide > MAX_PANES:
            size, slide = format_duration(window.size), format_duration(window.slide)
            what = f"{size} every {slide}: each row is in {window.size // window.slide:,} windows"
            hint = f"write a longer slide: at most {MAX_PANES:,} windows are possible"
            yield Problem(f"{path}.slide", "InvalidWindow", what, hint)

    def windows(self, window: WindowSpec) -> HoppingWindows:
        if window.size is None:
            raise ValueError("a hopping window has a size")
        return HoppingWindows(window.size, window.slide or window.size)
