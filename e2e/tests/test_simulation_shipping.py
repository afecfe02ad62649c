"""Simulations of waits: ancestors of a query that waits for capacity lose their pods.

Three of the nodes die for 45 s, and meanwhile six tasks lose their pods.
"""

from __future__ import annotations

import pytest

from rekindle_testing.simulation.faults import FaultKind, SimulatedFault
from rekindle_testing.simulation.run import Simulation
from rekindle_testing.simulation.shipping_mutants import SHIPPING_MUTANTS
from rekindle_testing.simulation.topologies import DEEP, Variant

pytestmark = [pytest.mark.simulated, pytest.mark.long]

SEED = 4
FAULTS = [
    *(SimulatedFault(20.0 + 0.1 * node, FaultKind.KILL_NODE, node, 0, 45.0) for node in range(3)),
    *(
        SimulatedFault(50.0 + 0.2 * task, FaultKind.EVICT_TASK, task, task, 1.0)
        for task in range(6)
    ),
]


def test_new_pods_begin_with_the_log_in_the_store() -> None:
    simulation = Simulation(SEED, FAULTS, Variant(DEEP))
    assert simulation.run().failure is None
    assert simulation.cluster.checks.adopted_logs > 0


@pytest.mark.parametrize("name", SHIPPING_MUTANTS)
def test_planted_bugs_in_shipped_logs_are_found(name: str) -> None:
    with SHIPPING_MUTANTS[name]():
        failure = Simulation(SEED, FAULTS, Variant(DEEP)).run().failure
    assert failure is not None
    assert failure.startswith(("I1", "I5"))
