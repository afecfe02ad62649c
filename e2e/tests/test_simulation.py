"""Simulations of whole topologies with random faults, and that they can fail."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from rekindle.coordinator.agreement.disputes import DisputeEvent, DisputePhase
from rekindle.coordinator.model import Partition
from rekindle.streams.sunion import SUnion
from rekindle_testing.simulation import mutants, topologies
from rekindle_testing.simulation.__main__ import describe_failure, summary
from rekindle_testing.simulation.coordinator_api import TOPOLOGY, compiled
from rekindle_testing.simulation.faults import (
    NOT_DRAWN,
    Fault,
    FaultKind,
    draw_faults,
    draw_wrong_results,
)
from rekindle_testing.simulation.injector import Injector
from rekindle_testing.simulation.mutants import MUTANTS, found_by
from rekindle_testing.simulation.planting import replaced
from rekindle_testing.simulation.run import Outcome, Simulation, shrink, simulate
from rekindle_testing.simulation.scheduler import Process, Scheduler
from rekindle_testing.simulation.schedules import SCHEDULES, run_schedule
from rekindle_testing.simulation.topologies import (
    WITH_TENTATIVE_RESULTS,
    Spec,
    Variant,
    draw_variant,
)
from rekindle_testing.simulation.values import Expected
from rekindle_testing.simulation.wrong_results import Recurrence

SEEDS = range(4)


def fault(
    kind: FaultKind, at: float, seconds: float, target: int = 0, other: int = 0, stays: bool = False
) -> Fault:
    return Fault(at, kind, target, other, seconds, stays)


BY_FORCE = 1  # `other` of an eviction
EVICTED_AT_ONCE = 30
"""`other` of FAIL_DONOR: the last digit is the delay (0: none), the tens are how it fails (3:
evicted by force)."""
REPEATED = list(Recurrence).index(Recurrence.REPEATED)  # `other` of a wrong result
CHAIN_SEED, DIAMOND_SEED, NOT_READY_SOON_SEED = 9, 0, 36
"""Seeds of small clusters. In the last one, nodes are NotReady after 8 s without heartbeats."""
STABLE_ONLY = {
    CHAIN_SEED: Variant(topologies.CHAIN),
    DIAMOND_SEED: Variant(topologies.DIAMOND),
}
FORGOTTEN = "reserved incarnations are forgotten"
PLANTED: Mapping[str, tuple[int, Sequence[Fault], str]] = {  # seed, faults, begin of the failure
    "a state is saved under another epoch": (CHAIN_SEED, [], "I1"),
    "inputs are merged in the order of arrival": (
        CHAIN_SEED,
        [fault(FaultKind.SLOW_TASK, 5.0, 20.0, target=0)],  # of the two partitions of the source
        "I1",
    ),
    "entries are committed before the sinks have written": (
        CHAIN_SEED,
        [fault(FaultKind.SINKS_DOWN, 3.0, 20.0)],
        "I2",
    ),
    "garbage collection keeps only the newest entries": (
        CHAIN_SEED,
        [fault(FaultKind.SINKS_DOWN, 10.0, 50.0)],  # sources go on, their consumer stays behind
        "I5",
    ),
    "the plan ignores what runs": (DIAMOND_SEED, [fault(FaultKind.KILL_NODE, 10.0, 25.0)], "I6"),
    "replicas may share a node": (DIAMOND_SEED, [fault(FaultKind.KILL_NODE, 10.0, 25.0)], "I6"),
    FORGOTTEN: (CHAIN_SEED, [fault(FaultKind.EVICT_TASK, 9.0, 1.0, other=BY_FORCE)], "I9"),
    "a replica acts after its term": (
        CHAIN_SEED,
        [  # with luck in the middle of a pass
            f
            for at in (9.0, 16.05, 23.1, 30.15, 37.2)
            for f in (
                *(fault(FaultKind.EVICT_TASK, at, 1.0, task, BY_FORCE) for task in range(4)),
                fault(FaultKind.FREEZE_OPERATOR, at + 0.33, 4.0),
            )
        ],
        "I9",
    ),
    "a new coordinator does not go on with a dispute": (
        DIAMOND_SEED,
        [  # its container starts again while the replica that is right computes again
            fault(FaultKind.WRONG_RESULT, 30.0, 0.0, target=0, other=REPEATED),
            fault(FaultKind.CRASH_COORDINATOR, 33.5, 0.5),
        ],
        "I2",
    ),
    "a reader stays at the replica that failed": (
        DIAMOND_SEED,
        [fault(FaultKind.STOP_TASK, 10.0, 5.0, target=2)],
        "the reader of",
    ),
    "nothing is read before it is deleted": (
        CHAIN_SEED,
        [  # a node is lost, and of another pod the operators do not hear that it was deleted
            *(fault(FaultKind.STALL_WATCHES, 19.0, 8.0, operator) for operator in (0, 1)),
            fault(FaultKind.EVICT_TASK, 19.2, 1.0, target=0, other=BY_FORCE),
            fault(FaultKind.KILL_NODE, 19.5, 25.0, target=1),
        ],
        "not read before",
    ),
    "a node that is not Ready is lost": (
        NOT_READY_SOON_SEED,
        [fault(FaultKind.STOP_KUBELET, 20.0, 25.0, target) for target in (0, 1)],
        "t-",  # the message begins with the name of a pod of topology t
    ),
}


@functools.cache
def outcome_of(seed: int) -> Outcome:
    return simulate(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_violate_no_invariant(seed: int) -> None:
    outcome = outcome_of(seed)
    assert outcome.failure is None
    assert outcome.written > 50


def test_a_seed_gives_the_same_run_again() -> None:
    assert simulate(3) == outcome_of(3)


_LONG_PARTITION = f"""
from rekindle_testing.simulation.faults import Fault, FaultKind
from rekindle_testing.simulation.run import Simulation

simulation = Simulation(0, [Fault(8.0, FaultKind.{FaultKind.PARTITION_NODE.name}, 0, 0, 8.0)])
simulation.scheduler.run_until(21.0)
print(*simulation.lines, simulation.scheduler.random.random(), sep="\\n")
simulation.cluster.end()
"""


@pytest.mark.parametrize("name", SCHEDULES)
def test_fixed_schedules_lead_to_their_transitions(name: str) -> None:
    *_, last = run_schedule(name)
    assert last.failure is None
    assert last.cells.get(SCHEDULES[name].cell)


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


def test_lost_replicas_get_their_state_from_partners() -> None:
    assert any(outcome_of(seed).moved for seed in SEEDS)


def test_all_kinds_of_faults_are_drawn() -> None:
    draws = (draw_faults, draw_wrong_results)
    kinds = {f.kind for draw in draws for seed in range(100) for f in draw(Scheduler(seed).random)}
    assert kinds == set(FaultKind) - NOT_DRAWN


def test_some_seeds_have_wrong_results_beside_their_other_faults() -> None:
    found = {}
    for seed in range(21):
        simulation = Simulation(seed)
        simulation.cluster.end()
        found[seed] = sum(fault.kind is FaultKind.WRONG_RESULT for fault in simulation.faults)
    assert [seed for seed, faults in found.items() if faults] == [15, 20]


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
    assert Injector.ends_at([fault]) == fault.at


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str) -> None:
    seed, faults, invariant = PLANTED[name]
    with MUTANTS[name]():
        failure = simulate(seed, faults, STABLE_ONLY.get(seed)).failure
    assert str(failure).startswith(invariant)


def test_an_error_in_the_code_of_a_mutant_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"broken": replaced(SUnion, "add", lambda add: lambda self: [])}
    monkeypatch.setattr(mutants, "MUTANTS", broken)
    with pytest.raises(ValueError, match="seed 0: TypeError"):
        found_by("broken", [0])


POLICIES = [
    (during_failure, during_stabilization)
    for during_failure in ("Process", "Delay")
    for during_stabilization in ("Process", "Delay", "Suspend")
]
INPUT_AWAY = [fault(FaultKind.STOP_TASK, 20.0, 14.0, target=0)]
"""One of the two partitions of the source is away, for longer than its reader waits."""


@pytest.mark.parametrize(("during_failure", "during_stabilization"), POLICIES)
def test_tentative_results_come_in_time_and_are_corrected(
    during_failure: str, during_stabilization: str
) -> None:
    variant = Variant(topologies.CHAIN, 2.0, during_failure, during_stabilization)
    outcome = simulate(CHAIN_SEED, INPUT_AWAY, variant)
    assert outcome.failure is None
    assert outcome.tentative > 5


AT_START = [fault(FaultKind.STOP_TASK, at, 20.0, target=0) for at in (6.0, 7.0)]
"""One of the two partitions of the source is away while the topology starts."""


SLOW_REPLICAS = [
    *INPUT_AWAY,
    *(fault(FaultKind.SLOW_TASK, 30.0, 25.0, target=t) for t in (2, 3)),
]
EVICTED = [fault(FaultKind.EVICT_TASK, 20.0, 1.0, target=2, other=BY_FORCE)]
EVICTED_AGAIN = [
    fault(FaultKind.EVICT_TASK, at, 1.0, target, BY_FORCE)
    for at, target in ((16.0, 2), (25.0, 3), (34.5, 2), (44.0, 3), (53.5, 2))
]
DONOR_IS_LOST = [fault(FaultKind.FAIL_DONOR, 22.0, 5.0, target=0, other=EVICTED_AT_ONCE)]
FINITE_DELAY = Variant(topologies.CHAIN, 2.0)
SUSPENDING = Variant(topologies.CHAIN, 2.0, during_stabilization="Suspend")
STABLE = Variant(topologies.CHAIN)


@pytest.mark.parametrize(
    ("name", "faults", "variant"),
    [
        ("UNDO is forgotten", INPUT_AWAY, FINITE_DELAY),
        ("UNDO begins an epoch too late", INPUT_AWAY, FINITE_DELAY),
        ("REC_DONE is never sent", INPUT_AWAY, FINITE_DELAY),
        ("each tentative epoch begins with the stable state", INPUT_AWAY, FINITE_DELAY),
        ("the stable branch goes on from the tentative state", INPUT_AWAY, FINITE_DELAY),
        ("tentative rows enter the log, and so the sinks", INPUT_AWAY, FINITE_DELAY),
        ("a missing epoch is replaced by the one before", INPUT_AWAY, FINITE_DELAY),
        ("new input waits during a failure", INPUT_AWAY, FINITE_DELAY),
        ("an epoch waits from when anything arrived last", INPUT_AWAY, FINITE_DELAY),
        ("a correction begins an epoch too late", INPUT_AWAY, FINITE_DELAY),
        ("a task is tentative before it is Live", AT_START, FINITE_DELAY),
        ("a replica that has promised to serve begins to correct", SLOW_REPLICAS, SUSPENDING),
        ("a state is moved under another epoch", EVICTED, STABLE),
        ("a copy counts as a witness", EVICTED_AGAIN, STABLE),
        ("a movement is never given up", DONOR_IS_LOST, STABLE),
    ],
)
def test_bugs_in_tentative_results_and_moved_states_are_found(
    name: str, faults: Sequence[Fault], variant: Variant
) -> None:
    with MUTANTS[name]():
        failure = simulate(CHAIN_SEED, faults, variant).failure
    assert failure is not None


def wrong_result(target: int, recurrence: Recurrence) -> list[Fault]:
    other = list(Recurrence).index(recurrence)
    return [fault(FaultKind.WRONG_RESULT, 20.0, 0.0, target, other)]


@pytest.mark.parametrize("recurrence", Recurrence)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_wrong_replica_is_found_and_nothing_wrong_stays(
    replica: int, recurrence: Recurrence
) -> None:
    simulation = Simulation(CHAIN_SEED, wrong_result(replica, recurrence), STABLE)
    outcome = simulation.run()
    checks = simulation.cluster.checks.wrong_result_checks
    assert outcome.failure is None
    assert outcome.cells["dispute", DisputePhase.OPEN, DisputeEvent.MATCHED] == 1
    assert checks is not None
    assert checks.guarantees.happened == 1
    assert not checks.guarantees.may_stay_wrong


@pytest.mark.parametrize(
    ("name", "topology", "replica", "recurrence"),
    [
        (
            "the first of two replicas that disagree is believed",
            topologies.CHAIN,
            0,
            Recurrence.ONCE,
        ),
        ("a dispute never ends", topologies.CHAIN, 0, Recurrence.ONCE),
        ("sinks write while replicas disagree", topologies.CHAIN, 0, Recurrence.ONCE),
        ("a replica that repeats its result is believed", topologies.CHAIN, 0, Recurrence.REPEATED),
        ("a replica that is known to be wrong stays", topologies.CHAIN, 0, Recurrence.ONCE),
        ("what has read a wrong epoch goes on", topologies.DIAMOND, 1, Recurrence.REPEATED),
        (
            "pods that start after a dispute compare no files",
            topologies.DIAMOND,
            2,
            Recurrence.REPEATED,
        ),
    ],
)
def test_bugs_in_disputes_are_found(
    name: str, topology: Spec, replica: int, recurrence: Recurrence
) -> None:
    with MUTANTS[name]():
        faults = wrong_result(replica, recurrence)
        failure = simulate(CHAIN_SEED, faults, Variant(topology)).failure
    assert failure is not None


def test_there_are_forty_planted_bugs() -> None:
    assert len(MUTANTS) >= 40


def test_half_of_the_seeds_have_tentative_results_under_all_policies() -> None:
    drawn = [draw_variant(Random(seed), topologies.CHAIN) for seed in range(200)]
    finite = [variant for variant in drawn if variant.max_delay_s is not None]
    assert 80 < len(finite) < 120
    found = {(v.during_failure, v.during_stabilization) for v in finite}
    assert found == set(POLICIES)


def test_a_failure_is_printed_with_the_faults_that_it_needs() -> None:
    seed, faults, invariant = PLANTED[FORGOTTEN]
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
    expected = Expected(topology)
    partitions = [Partition(s.id, i) for s in topology.segments for i in range(s.partitions)]
    assert len({expected.output(p, epoch=3) for p in partitions}) == len(partitions) > 2


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


def test_a_process_that_is_frozen_twice_waits_for_both_ends() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = Process(scheduler, "a")
    process.freeze()
    process.freeze()
    process.do(lambda: done.append("done"))
    process.thaw()
    assert done == []
    process.thaw()
    assert done == ["done"]


def test_a_dead_process_does_nothing() -> None:
    scheduler, done = Scheduler(0), list[str]()
    process = Process(scheduler, "a")
    process.after(1.0, lambda: done.append("late"))
    process.die()
    scheduler.run_until(5.0)
    assert done == []
