"""When the epochs of a source are released. Pure.

The clock decides when an epoch is released, never what is in it.

Design: docs/design/epochs.md#cuts.
"""

from __future__ import annotations

_DAY_US = 86_400_000_000
LONG_PAUSE_US = 365 * _DAY_US
"""A gap without rows that a source reports as a problem."""


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
