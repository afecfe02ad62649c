"""Windows of a fixed size, one in each `slide`: tumbling without `slide`, hopping with it. Or with
`step` cumulative ones, of which some begin together: one for each step up to the size.

Starts are multiples of `slide` since the Unix epoch, or with `step` of `size`; a pane is one slide
or one step long.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec
from rekindle.topology.units import format_duration

MAX_PANES = 100_000
"""Maximum of `size / slide` and `size / step`; a window of a day with a slide of a second has
86,400. After a gap in the input, and at its end, all the windows of a row close in one epoch."""


@dataclass(frozen=True, slots=True)
class HoppingWindows:
    """`size_us` is a multiple of `slide_us`."""

    size_us: int
    slide_us: int

    def describe(self) -> str:
        """Such as `24h every 6h`."""
        size, slide = format_duration(self.size_us), format_duration(self.slide_us)
        return size if self.size_us == self.slide_us else f"{size} every {slide}"

    def first_complete(self, lacks_us: int) -> int:
        return (lacks_us // self.slide_us + 1) * self.slide_us

    def first_open(self, watermark_us: int) -> int:
        return self.first_complete(watermark_us - self.size_us)

    @property
    def reach_us(self) -> int:
        """The last window that lacks the row begins with it; its row has the time of its end."""
        return self.size_us - 1


@dataclass(frozen=True, slots=True)
class CumulativeWindows:
    """`size_us` is a multiple of `step_us`."""

    size_us: int
    step_us: int

    def describe(self) -> str:
        """Such as `24h by steps of 1h`."""
        return f"{format_duration(self.size_us)} by steps of {format_duration(self.step_us)}"

    def first_complete(self, lacks_us: int) -> int:
        return (lacks_us // self.size_us + 1) * self.size_us

    def first_open(self, watermark_us: int) -> int:
        return watermark_us - watermark_us % self.size_us

    @property
    def reach_us(self) -> int:
        """As for others of this size: the longest window has the last row that lacks it."""
        return self.size_us - 1


class HoppingKind:
    """`size`; `slide` for windows that overlap, or `step` for windows that begin together."""

    further_fields = ("slide", "step")

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        for field, value in (("size", window.size), ("slide", window.slide), ("step", window.step)):
            if value == 0:
                what, hint = f"{field} is 0", "write a duration like 1h"
                yield Problem(f"{path}.{field}", "InvalidWindow", what, hint)
        if window.slide is not None and window.step is not None:
            what = "has slide and step: windows begin after each slide, or end after each step"
            yield Problem(f"{path}.step", "InvalidWindow", what, "write one of them")
        for field, part in (("slide", window.slide), ("step", window.step)):
            if window.size and part:
                yield from _check_parts(window.size, field, part, f"{path}.{field}")

    def windows(self, window: WindowSpec) -> HoppingWindows | CumulativeWindows:
        if window.size is None:
            raise ValueError("a window of this kind has a size")
        if window.step is not None:
            return CumulativeWindows(window.size, window.step)
        return HoppingWindows(window.size, window.slide or window.size)


def _check_parts(size_us: int, field: str, part_us: int, path: str) -> Iterator[Problem]:
    """Check the length of a window's panes, which is what `field` says."""
    size, part = format_duration(size_us), format_duration(part_us)
    if size_us % part_us:
        what = f"size ({size}) is not a multiple of {field} ({part})"
        hint = f"write a {field} that divides size, or leave {field} out"
        yield Problem(path, "InvalidWindow", what, hint)
    elif size_us // part_us > MAX_PANES:
        what = f"{size} by {part}: a row is in up to {size_us // part_us:,} windows"
        hint = f"write a longer {field}: at most {MAX_PANES:,} windows are possible"
        yield Problem(path, "InvalidWindow", what, hint)
