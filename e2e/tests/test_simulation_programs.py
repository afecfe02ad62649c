"""Code that blocks, in a simulation."""

from __future__ import annotations

import pytest

from rekindle_testing.simulation.operator.program import Program, SimulatedEvent
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess
from rekindle_testing.simulation.silence import FaultCount, Silence


def test_programs_take_turns_in_simulated_time() -> None:
    scheduler, done = Scheduler(0), list[tuple[str, float]]()

    def start(name: str, pause_s: float) -> None:
        process = SimulatedProcess(scheduler, name)

        def main() -> None:
            for _ in range(2):
                program.sleep(pause_s)
                done.append((name, scheduler.now))

        program = Program(process, main)

    start("a", 2.0)
    start("b", 3.0)
    scheduler.run_until(10.0)
    assert done == [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0)]


def test_a_program_of_a_dead_process_does_not_go_on() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = SimulatedProcess(scheduler, "a")

    def main() -> None:
        try:
            program.sleep(5.0)
        except Exception:  # as the product's loops do
            done.append("caught")
        done.append("went on")

    program = Program(process, main)
    scheduler.run_until(1.0)
    process.die()
    scheduler.run_until(10.0)
    assert done == []


def test_a_frozen_program_goes_on_later() -> None:
    scheduler, done = Scheduler(0), list[float]()
    process = SimulatedProcess(scheduler, "a")

    def main() -> None:
        program.sleep(1.0)
        done.append(scheduler.now)

    program = Program(process, main)
    scheduler.run_until(0.5)
    process.freeze()
    scheduler.run_until(4.0)
    process.thaw()
    assert done == [4.0]


def test_an_error_of_a_program_ends_the_simulation() -> None:
    scheduler = Scheduler(0)

    def main() -> None:
        raise ValueError("a bug")

    Program(SimulatedProcess(scheduler, "a"), main)
    with pytest.raises(ValueError, match="a bug"):
        scheduler.run_until(1.0)


def test_an_event_ends_a_wait_or_its_time_does() -> None:
    scheduler, done = Scheduler(0), list[tuple[bool, float]]()
    process = SimulatedProcess(scheduler, "a")
    event = SimulatedEvent(process)

    def main() -> None:
        for _ in range(2):
            done.append((event.wait(program, 3.0), scheduler.now))
            event.clear()

    program = Program(process, main)
    scheduler.after(1.0, event.set)
    scheduler.run_until(10.0)
    assert done == [(True, 1.0), (False, 4.0)]


def test_a_host_responds_steadily_only_long_after_a_long_silence() -> None:
    scheduler = Scheduler(0)
    silence = Silence(scheduler)

    def respond_at(*times: float) -> bool:
        for at in times:
            scheduler.run_until(at)
            silence.responded("a")
        return silence.responds_steadily("a")

    assert respond_at(0.0, 1.0, 2.5)
    scheduler.run_until(4.9)
    assert not silence.responds_steadily("a")
    assert not respond_at(5.0, 6.0)
    assert respond_at(*range(7, 22))  # a silence is remembered for 15 s


def test_calm_begins_when_the_last_fault_ends() -> None:
    scheduler = Scheduler(0)
    faults = FaultCount(scheduler)
    faults.began()
    faults.began()
    scheduler.run_until(5.0)
    faults.ended()
    assert faults.none_for_s == 0.0
    faults.ended()
    scheduler.run_until(8.0)
    assert faults.none_for_s == 3.0
