"""What the checks of a simulation know, independently of the product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle import names
from rekindle_testing.simulation.checks import Violation
from rekindle_testing.simulation.cluster import SimulatedCluster
from rekindle_testing.simulation.kube.objects import ApiRequest
from rekindle_testing.simulation.late_requests import (
    MAX_REQUEST_DELAY_S,
    perform_now_later_or_never,
)
from rekindle_testing.simulation.network import Network, Refused, TimedOut
from rekindle_testing.simulation.run import Simulation
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

SETTLED_S = 32.0
"""All tasks are ready, and have responded for long enough."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    made = Simulation(9, []).cluster
    made.scheduler.run_until(SETTLED_S)
    yield made
    made.end()


@pytest.mark.simulated
def test_tasks_and_coordinator_work_without_faults(cluster: SimulatedCluster) -> None:
    assert cluster.coordinator is not None
    tasks = {slot.key: pod.name for slot, pod in cluster.pods.items()}
    expected = {**tasks, names.COORDINATOR_KEY: cluster.coordinator.name}
    assert {slot: cluster.working.find(slot) for slot in expected} == expected


@pytest.mark.simulated
def test_a_pod_that_works_may_not_be_deleted(cluster: SimulatedCluster) -> None:
    """It works if it is needed, has been ready for a while, and responds to whoever would report it
    lost (`rekindle_testing.simulation.working`)."""
    name = next(iter(cluster.pods.values())).name
    assert cluster.leader is not None
    request = ApiRequest("DELETE", f"/api/v1/namespaces/default/pods/{name}", {})
    cluster.operator_checks.check_request(cluster.leader, request)
    with pytest.raises(Violation, match=f"{name} is deleted, which works"):
        cluster.scheduler.run_until(cluster.scheduler.now)


@pytest.mark.simulated
def test_a_pod_that_cannot_be_reached_does_not_count(cluster: SimulatedCluster) -> None:
    assert cluster.coordinator is not None
    own_node = cluster.network.node_of[cluster.coordinator.address]
    pod = next(p for p in cluster.pods.values() if cluster.network.node_of[p.address] != own_node)
    cluster.network.isolate(cluster.network.node_of[pod.address])
    silence_s = 2.6  # longer than the silence that may prove a loss
    cluster.scheduler.run_until(cluster.scheduler.now + silence_s)
    assert cluster.working.find(pod.slot.key) is None
    assert cluster.working.find(names.COORDINATOR_KEY) == cluster.coordinator.name


def test_what_failed_is_done_at_once_later_or_never() -> None:
    """A call that times out, or whose response is lost, may have an effect all the same."""
    scheduler, done_at = Scheduler(0), list[float]()
    for _ in range(100):
        perform_now_later_or_never(scheduler, lambda: done_at.append(scheduler.now))
    scheduler.run_until(MAX_REQUEST_DELAY_S)
    assert 0 < done_at.count(0.0) < len(done_at) < 100


def test_an_isolated_host_is_silent_and_a_process_that_is_gone_refuses() -> None:
    scheduler = Scheduler(0)
    network = Network(scheduler)
    network.node_of = {"a": "one", "b": "two"}
    ended: list[str] = []

    def call(host: str) -> None:
        network.call(
            caller, host, None, lambda result: ended.append(type(result).__name__), timeout_s=3.0
        )

    caller = SimulatedProcess(scheduler, "a")
    call("b")
    scheduler.run_until(2.0)
    network.isolate("two")
    call("b")
    scheduler.run_until(4.0)
    network.isolate("one")
    call("a")
    scheduler.run_until(6.0)
    assert ended == [Refused.__name__, Refused.__name__, TimedOut.__name__]
