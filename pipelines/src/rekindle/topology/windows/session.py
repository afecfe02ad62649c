"""Sessions: a window ends when its group has had no rows for a time, the *gap*.

Rows of a group that are less than the gap apart are in the same session.

Design: docs/design/engine.md#sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec
from rekindle.topology.units import format_duration


@dataclass(frozen=True, slots=True)
class SessionWindows:
    gap_us: int

    def describe(self) -> str:
        """Such as `session 30m`."""
        return f"session {format_duration(self.gap_us)}"

    def first_complete(self, lacks_us: int) -> int:
        return lacks_us + self.gap_us

    def first_open(self, watermark_us: int) -> int:
        """Of the earliest row of such a session: the session may have begun long before."""
        return watermark_us - self.gap_us + 1

    @property
    def reach_us(self) -> int:
        """To the end of the last session that may lack the row, if that has one row. Of a longer
        one nothing is known before it ends."""
        return 2 * self.gap_us - 1


class SessionKind:
    """`session`: the gap."""

    further_fields = ()

    def check(self, window: WindowSpec, path: str) -> Iterator[Problem]:
        if window.session == 0:
            what, hint = "session is 0", "write a duration like 30m"
            yield Problem(f"{path}.session", "InvalidWindow", what, hint)

    def windows(self, window: WindowSpec) -> SessionWindows:
        if window.session is None:
            raise ValueError("a session window has a gap")
        return SessionWindows(window.session)
