"""When the epochs of a source are released."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.task.core.source import long_pause_problem, released_epoch, released_in_s

DAY_US = 86_400_000_000


@given(st.integers(0, 10_000), st.integers(1, 5_000_000), st.floats(0, 1e5))
def test_an_epoch_is_released_when_its_time_is_over(
    origin_s: int, epoch_interval_us: int, now_s: float
) -> None:
    newest = released_epoch(now_s, origin_s * 1_000_000, epoch_interval_us)
    assert released_in_s(newest, now_s, origin_s * 1_000_000, epoch_interval_us) <= 1e-6
    assert released_in_s(newest + 1, now_s, origin_s * 1_000_000, epoch_interval_us) > 0


def test_gaps_of_years_are_reported() -> None:
    assert long_pause_problem(5, None, DAY_US) is None
    assert long_pause_problem(5, 5 + 364, DAY_US) is None
    assert "no rows until epoch 370, 365 days from now" in (
        long_pause_problem(5, 370, DAY_US) or ""
    )
