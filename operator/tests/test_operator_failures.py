"""Actions that fail: what is reported, and what goes on meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flights_example import flights_spec
from model_api import ApiError, ModelOperator
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.cluster.failures import ActionFailures
from rekindle_operator.cluster.model import PodView, UncreatedPod

pytestmark = pytest.mark.simulated

LONG_STEP_S = 3.0
"""Between passes while a state lasts: shorter than the wait after the third failure of a request,
and than all time-outs."""


@pytest.fixture
def operator(running: ModelCluster) -> ModelOperator:
    made = ModelOperator(running)
    made.run(1.0)
    assert running.status()["phase"] == "Running"
    return made


def test_a_repeatedly_refused_deletion_is_reported(operator: ModelOperator) -> None:
    operator.api.errors = [ApiError("DELETE", "/pods/", 403, "deletion is forbidden here")]
    operator.model.kill_node_until_not_ready("b")
    operator.run(8.0)
    degraded = operator.model.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ActionFailed")
    assert "DeletePod" in degraded["message"]
    assert "403 deletion is forbidden here" in degraded["message"]
    operator.api.errors.clear()
    operator.run(60.0, step_s=LONG_STEP_S)
    assert operator.model.condition("Degraded")["status"] == "False"


def pods_on(model: ModelCluster, node: str) -> dict[str, PodView]:
    return {p.name: p for p in model.pods() if p.node == node and not p.terminating}


def cordon_node_of_coordinator(model: ModelCluster) -> str:
    node = model.coordinator().node
    assert node is not None
    model.nodes[node] = replace(model.nodes[node], cordoned=True, version=model.next_version())
    return node


def uncreated_coordinator(operator: ModelOperator) -> UncreatedPod:
    uncreated = operator.cache.snapshot().uncreated_pods
    return next(x for ref, x in uncreated.items() if ref.slot == names.COORDINATOR_KEY)


def has_met_full_quota(operator: ModelOperator) -> bool:
    """With the newest request for the coordinator's pod."""
    return uncreated_coordinator(operator).over_quota_since is not None


@pytest.mark.parametrize("status", [403, 500])
def test_what_works_on_a_drained_node_stays_while_no_pod_can_be_created(
    operator: ModelOperator, status: int
) -> None:
    """An admission policy, rights, a slow API server: nobody gains by its deletion. After 500, the
    pod may exist."""
    model = operator.model
    model.add_node("d")
    operator.api.errors = [ApiError("POST", "/pods", status, "not now")]
    node = cordon_node_of_coordinator(model)
    before = pods_on(model, node)
    operator.run(120.0, step_s=LONG_STEP_S)
    assert pods_on(model, node).keys() == before.keys()
    assert set(model.query_states().values()) == {"Live"}
    message = model.condition("Valid")["message"]
    assert f"a drain of node {node} waits for " in message
    assert "the coordinator" in message
    assert "(successor: API server: " in message
    operator.api.errors.clear()
    operator.run(120.0, step_s=LONG_STEP_S)
    assert not pods_on(model, node)
    assert "waits for" not in model.condition("Valid")["message"]


def test_a_coordinator_on_a_drained_node_serves_while_a_quota_is_full(
    operator: ModelOperator,
) -> None:
    """Until a task with a live partner makes room: successors of tasks wait for the quota, too, and
    let the coordinator go first, in whatever order threads send the requests."""
    model = operator.model
    model.add_node("d")
    model.quota = len(model.raw_pods)
    node = cordon_node_of_coordinator(model)
    waited = False
    for _ in range(60):
        operator.run(6.0, step_s=LONG_STEP_S)
        assert not model.coordinator().terminating
        assert set(model.query_states().values()) == {"Live"}
        waited |= "waits for the coordinator" in model.condition("Valid")["message"]
    assert waited
    assert model.coordinator().node not in (None, node)
    assert {p.segment_name for p in pods_on(model, node).values()} <= {"routes", "storms"}


@pytest.mark.parametrize(("after_s", "status"), [(8.0, 0), (40.0, 0), (8.0, 409), (20.0, 500)])
def test_a_coordinator_whose_drained_node_dies_is_replaced_soon_in_a_full_quota(
    operator: ModelOperator, after_s: float, status: int
) -> None:
    """`status`: of the last request before that; 0: also over the quota."""
    model = operator.model
    model.quota = len(model.raw_pods)
    node = cordon_node_of_coordinator(model)
    operator.run(after_s, step_s=1.0)
    if status:
        operator.api.errors = [ApiError("POST", "/pods", status, "not now")]
        for _ in range(40):  # requests are at most 30 s apart
            operator.run(1.0, step_s=1.0)
            if not has_met_full_quota(operator):
                break
        assert not has_met_full_quota(operator)
        operator.api.errors.clear()
    model.kill_node_until_not_ready(node)
    operator.run(9.0)
    assert model.coordinator().node not in (None, node)
    assert set(model.query_states().values()) == {"Live"}


def test_a_coordinator_that_a_quota_refuses_is_requested_once_after_each_wait(
    operator: ModelOperator,
) -> None:
    """Each failure doubles the wait once."""
    model = operator.model
    model.quota = len(model.raw_pods)
    cordon_node_of_coordinator(model)
    for failures, seconds in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)):
        operator.run(0.5)
        assert uncreated_coordinator(operator).failures == failures
        operator.run(seconds - 0.5)
        assert uncreated_coordinator(operator).failures == failures


def test_a_roll_waits_for_room_in_a_quota(operator: ModelOperator) -> None:
    """Any pod could take the place of a coordinator that is deleted first."""
    model = operator.model
    model.quota, old = len(model.raw_pods), model.coordinator()
    model.edit("flights", image="another")
    operator.run(3.0)
    view = model.topologies["flights"]
    model.topologies["flights"] = replace(view, roll=True, version=model.next_version())
    for _ in range(40):
        operator.run(LONG_STEP_S, step_s=LONG_STEP_S)
        assert model.coordinator() == old
        assert set(model.query_states().values()) == {"Live"}
    message = model.condition("Valid")["message"]
    assert "the roll waits for a new coordinator (API server: pods" in message
    model.quota += 1
    operator.run(120.0, step_s=LONG_STEP_S)
    assert {raw["spec"]["containers"][0]["image"] for raw in model.raw_pods.values()} == {"another"}
    assert "waits" not in model.condition("Valid")["message"]


def test_what_a_drain_waits_for_is_named_beside_an_invalid_edit(operator: ModelOperator) -> None:
    model = operator.model
    query = flights_spec()["queries"][0]
    wrong = [{**query, "name": f"q{n}", "from": f"missing{n}"} for n in range(40)]
    model.edit("flights", queries=wrong)
    operator.run(3.0)
    assert len(model.condition("Valid")["message"]) > 1000
    operator.api.errors = [ApiError("POST", "/pods", 403, "denied by policy")]
    node = cordon_node_of_coordinator(model)
    operator.run(20.0)
    valid = model.condition("Valid")
    assert valid["status"] == "False"
    assert f"a drain of node {node} waits for the coordinator, " in valid["message"]
    assert valid["message"].endswith("[generation 1 keeps running]")


def test_single_and_old_failures_are_not_reported() -> None:
    failures = ActionFailures()
    failures.failed("default/t", "DeletePod u", "409 conflict", now=0.0)
    assert failures.by_topology(1.0) == {}
    failures.failed("default/t", "DeletePod u", "409 conflict", now=2.0)
    assert failures.by_topology(3.0) == {"default/t": "DeletePod u fails: 409 conflict"}
    failures.failed("default/t", "OpenGate v", "500", now=60.0)
    failures.succeeded("OpenGate v")
    assert failures.by_topology(93.0) == {}
