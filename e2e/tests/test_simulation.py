"""Simulations of whole topologies with random faults, and that they can fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rekindle_testing.simulation.__main__ import story, summary
from rekindle_testing.simulation.faults import FaultKind, draw_faults
from rekindle_testing.simulation.mutants import MUTANTS, found_by
from rekindle_testing.simulation.run import Simulation, shortest, simulate
from rekindle_testing.simulation.scheduler import Process, Scheduler

SEEDS = range(4)
AFTER_TERM = "a replica acts after its term"
QUICKLY_FOUND = {  # a seed that finds it soon, and what it violates
    "a state is saved under another epoch": (93, "I1"),
    "entries are committed before the sinks have written": (128, "I2"),
    "the plan ignores what runs": (318, "I6"),
    "replicas may share a node": (279, "I6"),
    "reserved incarnations are forgotten": (1, "I9"),
    AFTER_TERM: (425, "I9"),
    "a node that is not Ready is lost": (359, "t-mid-0-1-2 replaces a task that works"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_violate_no_invariant(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.failure is None
    assert outcome.written > 50


def test_a_seed_gives_the_same_run_again() -> None:
    assert simulate(3) == simulate(3)


_LONG_PARTITION = f"""
from rekindle_testing.simulation.faults import Fault, FaultKind
from rekindle_testing.simulation.run import Simulation

simulation = Simulation(0, [Fault(8.0, FaultKind.{FaultKind.PARTITION_NODE.name}, 0, 0, 8.0)])
simulation.scheduler.run_until(21.0)
print(*simulation.lines, simulation.scheduler.random.random(), sep="\\n")
simulation.cluster.end()
"""


def test_another_process_gives_the_same_run() -> None:
    """Sets of strings have another order in it; the kubelet ends several pods at once."""
    first, second = (
        subprocess.run(
            [sys.executable, "-c", _LONG_PARTITION],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second
    assert "deleted" in first


def test_a_killed_operator_does_not_lead() -> None:
    simulation = Simulation(1, [])
    cluster, scheduler = simulation.cluster, simulation.scheduler
    while (killed := cluster.leader) is None:
        scheduler.run_until(scheduler.now + 0.5)
    cluster.crash_operator(killed, down_s=1.0)
    assert killed.leader.leading
    assert cluster.leader is None
    cluster.end()


def test_lost_replicas_get_their_state_from_partners() -> None:
    assert any(simulate(seed).moved for seed in SEEDS)


def test_all_kinds_of_faults_are_drawn() -> None:
    kinds = {fault.kind for seed in range(30) for fault in draw_faults(Scheduler(seed).random)}
    assert kinds == set(FaultKind)


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_planted_bugs_are_found(name: str) -> None:
    seed, invariant = QUICKLY_FOUND[name]
    found = found_by(name, [seed])
    assert found is not None
    assert found[1].startswith(invariant)


def test_a_failure_is_told_with_the_faults_that_it_needs() -> None:
    seed, invariant = QUICKLY_FOUND[AFTER_TERM]
    with MUTANTS[AFTER_TERM]():
        failed = simulate(seed)
        short = shortest(failed)
        lines = story(failed)
    assert 1 <= len(short.faults) < len(failed.faults)
    assert str(short.failure).startswith(invariant)
    assert f"FIRST={failed.seed} SEEDS=1" in lines[-2]
    assert f"failed seeds: [{failed.seed}]" in summary([failed])[0]


def test_a_frozen_process_does_later_what_it_has_missed() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = Process(scheduler, "a")
    process.freeze()
    for name in ("one", "two"):
        process.after(1.0, lambda name=name: done.append(name))  # type: ignore[misc]  # each its own
    scheduler.run_until(5.0)
    assert done == []
    process.thaw()
    assert done == ["one", "two"]


def test_a_dead_process_does_nothing() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = Process(scheduler, "a")
    process.after(1.0, lambda: done.append("late"))
    process.die()
    scheduler.run_until(5.0)
    assert done == []
