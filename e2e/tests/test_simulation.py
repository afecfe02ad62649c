"""Simulations of whole topologies with random faults, and that they can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from rekindle.streams.sunion import SUnion
from rekindle.topology.model import Partition
from rekindle_testing.simulation import mutants, topologies
from rekindle_testing.simulation.__main__ import describe_failure, summary
from rekindle_testing.simulation.coordinator_api import TOPOLOGY, compiled
from rekindle_testing.simulation.expected import Expected
from rekindle_testing.simulation.faults import (
    NOT_DRAWN,
    FaultKind,
    SimulatedFault,
    draw_faults,
    draw_wrong_results,
)
from rekindle_testing.simulation.injector import SimulatedInjector
from rekindle_testing.simulation.mutants import MUTANTS, found_by
from rekindle_testing.simulation.planting import replaced
from rekindle_testing.simulation.run import Simulation, shrink, simulate, wrong_results
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess
from rekindle_testing.simulation.topologies import (
    WITH_TENTATIVE_RESULTS,
    Spec,
    Variant,
    draw_variant,
)
from rekindle_testing.simulation.values import TaskComputation

pytestmark = pytest.mark.simulated

BY_FORCE = 1  # `other` of an eviction
CHAIN_SEED = 9  # of a small cluster
CHAIN = Variant(topologies.CHAIN)


def fault(
    kind: FaultKind, at: float, seconds: float, target: int = 0, other: int = 0
) -> SimulatedFault:
    return SimulatedFault(at, kind, target, other, seconds, stays=False)


FORGOTTEN = "reserved incarnations are forgotten"
PLANTED: Mapping[str, tuple[int, Sequence[SimulatedFault], Variant, str]] = {
    # One of each: what a task, a coordinator and an operator decide, and tentative results. With
    # seed, faults, variant, and begin of the failure.
    "a state is saved under another epoch": (CHAIN_SEED, [], CHAIN, "I1"),
    "entries are committed before the sinks have written": (
        CHAIN_SEED,
        [fault(FaultKind.SINKS_DOWN, 3.0, 20.0)],
        CHAIN,
        "I2",
    ),
    FORGOTTEN: (CHAIN_SEED, [fault(FaultKind.EVICT_TASK, 9.0, 1.0, other=BY_FORCE)], CHAIN, "I9"),
    "a correction begins an epoch too late": (
        CHAIN_SEED,
        [fault(FaultKind.STOP_TASK, 20.0, 14.0)],  # one of the two partitions of the source
        Variant(topologies.CHAIN, 2.0),
        "",
    ),
}


_LONG_PARTITION = f"""
from rekindle_testing.simulation.faults import FaultKind, SimulatedFault
from rekindle_testing.simulation.run import Simulation

kind = FaultKind.{FaultKind.PARTITION_NODE.name}
simulation = Simulation(0, [SimulatedFault(8.0, kind, 0, 0, 8.0)])
simulation.scheduler.run_until(21.0)
print(*simulation.lines, simulation.scheduler.random.random(), sep="\\n")
simulation.cluster.end()
"""


@pytest.mark.process
def test_another_process_gives_the_same_run() -> None:
    """Sets of strings are ordered differently in another process, which must not show: here the
    kubelet of the node ends several pods at once."""
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


def test_all_kinds_of_faults_are_drawn() -> None:
    draws = (draw_faults, draw_wrong_results)
    kinds = {f.kind for draw in draws for seed in range(100) for f in draw(Scheduler(seed).random)}
    assert kinds == set(FaultKind) - NOT_DRAWN


def test_overlapping_faults_end_with_the_last() -> None:
    kinds = (FaultKind.API_DOWN, FaultKind.API_ERRORS, FaultKind.STORE_DOWN, FaultKind.SINKS_DOWN)
    faults = [fault(kind, at, 2.0) for kind in kinds for at in (1.0, 2.0)]
    cluster = (simulation := Simulation(0, faults)).cluster
    lasting = (cluster.server.down, cluster.server.fails, cluster.store.down, cluster.sinks.down)
    simulation.scheduler.run_until(3.5)
    assert all(lasting)
    simulation.scheduler.run_until(4.5)
    assert not any(lasting)
    cluster.end()


def test_one_fault_may_stay() -> None:
    drawn = [draw_faults(Scheduler(seed).random) for seed in range(30)]
    assert {sum(fault.stays for fault in faults) for faults in drawn} == {0, 1}
    fault = next(fault for faults in drawn for fault in faults if fault.stays)
    assert SimulatedInjector.ends_at([fault]) == fault.at


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str) -> None:
    seed, faults, variant, invariant = PLANTED[name]
    with MUTANTS[name]():
        failure = simulate(seed, faults, variant).failure
    assert failure is not None
    assert failure.startswith(invariant)


def test_an_error_in_the_code_of_a_mutant_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"broken": replaced(SUnion, "add", lambda add: lambda self: [])}
    monkeypatch.setattr(mutants, "MUTANTS", broken)
    with pytest.raises(ValueError, match="seed 0: TypeError"):
        found_by("broken", [0])


def test_seeds_draw_all_policies_and_wrong_results() -> None:
    drawn = [draw_variant(Random(seed), topologies.CHAIN) for seed in range(200)]
    finite = [variant for variant in drawn if variant.max_delay_s is not None]
    assert 0 < len(finite) < len(drawn)
    assert len({(v.during_failure, v.during_stabilization) for v in finite}) == 6
    assert {bool(wrong_results(seed)) for seed in range(200)} == {False, True}


def test_a_failure_is_printed_with_the_faults_that_it_needs() -> None:
    seed, faults, _, invariant = PLANTED[FORGOTTEN]
    with MUTANTS[FORGOTTEN]():
        failed = simulate(seed, [fault(FaultKind.ADD_NODE, 5.0, 1.0), *faults])
        short = shrink(failed)
        lines = describe_failure(failed)
    assert short.faults == faults
    assert str(short.failure).startswith(invariant)
    assert f"FIRST={failed.seed} SEEDS=1" in lines[-2]
    assert f"failed seeds: [{failed.seed}]" in summary([failed])[0]


@pytest.mark.parametrize("spec", WITH_TENTATIVE_RESULTS)
def test_no_two_partitions_compute_the_same(spec: Spec) -> None:
    topology = compiled(TOPOLOGY, spec)
    expected = Expected(TaskComputation(topology))
    partitions = [Partition(s.id, i) for s in topology.segments for i in range(s.partitions)]
    assert len({expected.output(p, epoch=3) for p in partitions}) == len(partitions) > 2


def test_a_frozen_process_does_later_what_it_has_missed() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = SimulatedProcess(scheduler, "a")
    process.freeze()
    for name in ("one", "two"):
        process.after(1.0, lambda name=name: done.append(name))  # type: ignore[misc]  # each its own
    scheduler.run_until(5.0)
    assert done == []
    process.thaw()
    assert done == ["one", "two"]


def test_a_process_that_is_frozen_twice_waits_for_both_ends() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = SimulatedProcess(scheduler, "a")
    process.freeze()
    process.freeze()
    process.do(lambda: done.append("done"))
    process.thaw()
    assert done == []
    process.thaw()
    assert done == ["done"]


def test_a_dead_process_does_nothing() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = SimulatedProcess(scheduler, "a")
    process.after(1.0, lambda: done.append("late"))
    process.die()
    scheduler.run_until(5.0)
    assert done == []
