"""The operator's clock does not jump, whatever happens to the machine's."""

from __future__ import annotations

import pytest

from rekindle_operator.clock import SteadyClock


class Machine:
    def __init__(self) -> None:
        self.wall_s, self.elapsed_s = 1_800_000_000.0, 50.0
        self.clock = SteadyClock(lambda: self.wall_s, lambda: self.elapsed_s)

    def after(self, seconds: float) -> float:
        """How much time has passed by the clock."""
        before = self.clock()
        self.wall_s += seconds
        self.elapsed_s += seconds
        return self.clock() - before


def test_a_steady_clock_follows_the_machines_clock() -> None:
    machine = Machine()
    assert machine.after(10.0) == pytest.approx(10.0)
    assert machine.clock() == machine.wall_s


@pytest.mark.parametrize("step_s", [3600.0, 7.0, -7.0, -3600.0])
def test_a_step_of_the_machines_clock_changes_no_age(step_s: float) -> None:
    machine = Machine()
    before = machine.clock()
    machine.wall_s += step_s
    assert machine.clock() == before
    assert machine.after(4.0) == pytest.approx(4.0, abs=0.25)


@pytest.mark.parametrize("step_s", [7.0, -7.0])
def test_a_steady_clock_is_slewed_to_the_machines_clock(step_s: float) -> None:
    machine = Machine()
    machine.wall_s += step_s
    for _ in range(200):
        assert machine.after(1.0) > 0
    assert machine.clock() == pytest.approx(machine.wall_s)
