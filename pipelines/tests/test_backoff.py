"""Waits between attempts (rekindle.backoff)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.backoff import Backoff, BackoffPolicy

POLICY = BackoffPolicy(first_s=0.5, longest_s=30.0, jitter=0.5)


def test_waits_double_up_to_the_limit() -> None:
    waits = [POLICY.wait_s(n) for n in (0, 1, 2, 3, 7, 8, 10_000)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


@given(failures=st.integers(1, 50), draw=st.floats(0, 1))
def test_jitter_takes_at_most_its_share(failures: int, draw: float) -> None:
    longest_s = POLICY.wait_s(failures)
    assert 0.5 * longest_s <= POLICY.wait_s(failures, draw) <= longest_s


def test_a_success_resets_the_back_off() -> None:
    backoff = Backoff(POLICY, draw=lambda: 1.0)
    assert [backoff.failed(), backoff.failed()] == pytest.approx([0.5, 1.0])
    backoff.succeeded()
    assert backoff.failed() == pytest.approx(0.5)
