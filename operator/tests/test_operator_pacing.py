"""When the next pass of the control loop is."""

from __future__ import annotations

import pytest

from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.pacing import StandbyPasses, wait_s
from rekindle_operator.settings import Timing

TIMING = Timing(tick_s=0.5, report_fresh_s=2.5)


def wait_with(*ages_s: float) -> float:
    reports = {str(n): 100.0 - age for n, age in enumerate(ages_s)}
    return wait_s(Snapshot(report_times=reports), 100.0, TIMING)


def test_the_next_pass_is_when_a_report_expires() -> None:
    assert wait_with(2.3, 0.5) == pytest.approx(0.2)


def test_fresh_and_expired_reports_change_no_interval() -> None:
    assert wait_with() == 0.5
    assert wait_with(0.1, 1.0) == 0.5
    assert wait_with(60.0) == 0.5


def test_a_report_about_to_expire_makes_no_busy_loop() -> None:
    assert wait_with(2.4999) >= 0.02


def test_standby_passes_take_a_small_share_of_a_core() -> None:
    passes = StandbyPasses()
    assert passes.is_due(0.0)
    passes.record_pass(began=0.0, ended=0.01)
    assert not passes.is_due(4.0)
    assert passes.is_due(6.0)
    passes.record_pass(began=6.0, ended=8.0)
    assert not passes.is_due(100.0)
    assert passes.is_due(109.0)
