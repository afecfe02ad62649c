"""When the epochs of a source are released. Pure.

The clock decides when an epoch is released, never what is in it.

Design: docs/design/epochs.md#cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.protocol import SourceProgress

_DAY_US = 86_400_000_000
LONG_PAUSE_US = 365 * _DAY_US
"""A gap without rows that a source reports as a problem."""


@dataclass(slots=True)
class LiveSourceStatus:
    """How far a live source is read. `behind`: by split, how many positions are there that are not
    read; empty: not known yet. `bad_records`, `example`: as in `SourceProgress`."""

    name: str
    behind: Mapping[str, int] = field(default_factory=dict)
    bad_records: int = 0
    example: str = ""

    def progress(self) -> SourceProgress:
        return SourceProgress(
            name=self.name,
            behind=sum(self.behind.values()) if self.behind else None,
            bad_records=self.bad_records,
            example=self.example[:1024],
        )


def released_epoch(now_s: float, origin_us: int, epoch_interval_us: int) -> int:
    """The newest epoch whose time has passed; `now_s`: Unix time."""
    return int((int(now_s * 1_000_000) - origin_us) // epoch_interval_us) - 1


def released_in_s(epoch: int, now_s: float, origin_us: int, epoch_interval_us: int) -> float:
    """How long until an epoch is released; 0 if it is."""
    return max(0.0, (origin_us + (epoch + 1) * epoch_interval_us) / 1e6 - now_s)


def long_pause_problem(
    next_epoch: int, resumes_at: int | None, epoch_interval_us: int
) -> str | None:
    """Reports pauses of years, which usually mean a row with a wrong time: the task would wait that
    long for the next row. `resumes_at`: its epoch; None if there is none."""
    if (
        resumes_at is None
        or (gap_us := (resumes_at - next_epoch) * epoch_interval_us) < LONG_PAUSE_US
    ):
        return None
    return (
        f"the source has no rows until epoch {resumes_at:,}, {gap_us // _DAY_US:,} days from now; "
        "correct the times of its rows, or raise speedup"
    )
