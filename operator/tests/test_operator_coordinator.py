"""When a coordinator is replaced, by whose clock, and on which node the next one runs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from model_cluster import ModelCluster
from model_objects import rfc3339

from rekindle import names
from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.cluster.uncreated_pods import UncreatedPods
from rekindle_operator.reconcile.actions import Action, CreatePod, DeletePod, EmitEvent
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.recovery.losses import assess_nodes


def bind_new_coordinator(cluster: ModelCluster, **status: Any) -> dict[str, Any]:
    """As if the coordinator's pod were another one, just bound to its node, without a Lease."""
    raw = cluster.raw_pods["flights-coordinator-1"]
    raw["metadata"]["uid"] = "uid-fresh"
    raw["status"] = {"phase": "Running", **status}
    cluster.leases = {k: replace(x, holder="") for k, x in cluster.leases.items()}
    return raw


def pass_time(cluster: ModelCluster, seconds: float) -> None:
    for _ in range(round(seconds / 5)):
        cluster.settle()
        cluster.pass_time(5.0)
    cluster.settle()


def test_a_clock_that_is_ahead_replaces_no_new_coordinator(running: ModelCluster) -> None:
    raw = bind_new_coordinator(running)
    raw["metadata"]["creationTimestamp"] = rfc3339(running.now - 65)
    pass_time(running, 30)
    assert "flights-coordinator-1" in running.raw_pods


def test_a_slow_image_pull_replaces_no_coordinator(running: ModelCluster) -> None:
    bind_new_coordinator(running, phase="Pending")
    pass_time(running, 240)
    assert "flights-coordinator-1" in running.raw_pods


@pytest.mark.parametrize(
    ("status", "within_s"),
    [
        ({"phase": "Running"}, 70),
        ({"phase": "Pending"}, 310),
    ],
)
def test_a_coordinator_that_never_starts_is_replaced_elsewhere(
    running: ModelCluster, status: dict[str, Any], within_s: float
) -> None:
    bind_new_coordinator(running, **status)
    bad = running.coordinator().node
    running.binding = False
    pass_time(running, within_s)
    assert "flights-coordinator-1" not in running.raw_pods
    affinity = running.raw_pods["flights-coordinator-2"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchFields"][0]["values"] == [bad]


def test_a_coordinator_on_a_node_that_died_before_it_came_is_replaced_soon(
    running: ModelCluster,
) -> None:
    """The scheduler chose the node just before it became NotReady, like most others. Nobody knows
    whether they are lost: their kubelets respond, and only this coordinator could report."""
    bind_new_coordinator(running, phase="Pending")
    bad = running.coordinator().node
    good = next(name for name in running.nodes if name != bad)
    for name in running.nodes.keys() - {good}:
        running.nodes[name] = replace(running.nodes[name], ready=False)
    pass_time(running, 15)
    assert running.coordinator().node == good


def test_a_coordinator_that_renews_its_lease_stays(running: ModelCluster) -> None:
    """What its kubelet writes does not reach the API server, and the node is NotReady."""
    running.raw_pods["flights-coordinator-1"]["status"] = {"phase": "Pending"}
    running.turn_not_ready(running.coordinator().node or "")
    pass_time(running, 15)
    assert running.coordinator().name == "flights-coordinator-1"


def test_a_coordinator_bound_just_now_is_not_replaced(running: ModelCluster) -> None:
    """It waited for a node for a minute, and its node is NotReady for a moment."""
    raw = bind_new_coordinator(running, phase="Pending")
    node = raw["spec"].pop("nodeName")
    running.binding = False
    pass_time(running, 60)
    raw = running.raw_pods[running.coordinator().name]
    raw["spec"]["nodeName"] = node
    running.turn_not_ready(node)
    running.settle()
    assert running.coordinator().node == node
    pass_time(running, 5)
    assert running.coordinator().node != node


def reserve_coordinator(running: ModelCluster, incarnation: int) -> None:
    status = running.status("flights")
    status["slots"] = [
        {**s, "incarnation": incarnation} if s["slot"] == names.COORDINATOR_KEY else s
        for s in status["slots"]
    ]
    running.write_status("flights", status)


@pytest.mark.parametrize("may_exist", [False, True])
def test_a_coordinator_that_may_exist_gets_another_incarnation(
    running: ModelCluster, may_exist: bool
) -> None:
    """Its creation was refused, or had no response: then it may have run, and have ended."""
    del running.raw_pods["flights-coordinator-1"]
    uid = running.topologies["flights"].uid
    ref = IncarnationRef(uid, names.COORDINATOR_KEY, 2)
    reserve_coordinator(running, 2)
    running.uncreated_pods = UncreatedPods({}).with_failed_create(
        ref, "no response", running.now, None, may_exist=may_exist
    )
    pass_time(running, 10)
    created = [name for name in running.raw_pods if "coordinator" in name]
    assert created == [f"flights-coordinator-{3 if may_exist else 2}"]


def test_failures_without_a_response_count_together() -> None:
    first, second = (IncarnationRef("u", names.COORDINATOR_KEY, number) for number in (2, 3))
    pods = UncreatedPods({}).with_create_attempt(first, 0.0, None)
    pods = pods.with_failed_create(first, "no response", 0.0, None, may_exist=True)
    pods = pods.with_create_attempt(second, 1.0, None)
    pods = pods.with_failed_create(second, "no response", 1.0, None, may_exist=True)
    assert [(ref, x.failures) for ref, x in pods.by_ref.items()] == [(second, 2)]


def test_a_coordinator_that_works_stays_while_its_successor_is_not_created(
    running: ModelCluster,
) -> None:
    """While its node is drained. A slow API server is no reason to delete it: neither a creation
    without a response, nor the next one, of another incarnation, which has no response yet."""
    old = running.coordinator()
    assert old.node is not None
    running.nodes[old.node] = replace(running.nodes[old.node], cordoned=True)
    uid = running.topologies["flights"].uid
    second, third = (IncarnationRef(uid, names.COORDINATOR_KEY, number) for number in (2, 3))
    pods = UncreatedPods({}).with_create_attempt(second, running.now, None)
    pods = pods.with_failed_create(second, "timed out", running.now, None, may_exist=True)
    running.uncreated_pods = pods.with_create_attempt(third, running.now, None)
    reserve_coordinator(running, third.incarnation)
    found = reconcile(running.snapshot(), running.now, running.settings)
    assert old.name not in [action.name for action in found if isinstance(action, DeletePod)]


def test_a_coordinator_whose_secret_is_missing_stays(running: ModelCluster) -> None:
    """Another one would not start either, unless the topology was edited."""
    missing = {"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}
    container = {"name": "coordinator", "state": {"waiting": missing}}
    bind_new_coordinator(running, phase="Pending", containerStatuses=[container])
    pass_time(running, 400)
    assert running.coordinator().incarnation == 1
    assert 'secret "key" not found' in running.condition("Ready")["message"]
    running.edit("flights", podTemplate={"spec": {"nodeSelector": {"kubernetes.io/hostname": "b"}}})
    pass_time(running, 5)
    assert running.coordinator().incarnation == 2


@pytest.mark.parametrize("taken", [0, 1])
def test_room_that_a_task_makes_is_for_the_coordinator(running: ModelCluster, taken: int) -> None:
    """Its request is the last one of each pass, as it may be by chance. Two tasks make room. If
    another owner has `taken` one of their places, a successor that no node takes would keep the
    other one."""
    model, old = running, running.coordinator()
    model.unbound_segments.add("routes")
    model.quota = full = len(model.raw_pods)
    node = model.nodes[old.node or ""]
    model.nodes[node.name] = replace(node, cordoned=True, version=model.next_version())

    def is_for_coordinator(action: Action) -> bool:
        return isinstance(action, CreatePod) and action.is_coordinator

    for _ in range(60):
        actions = reconcile(model.snapshot(), model.now, model.settings)
        model.apply(sorted(actions, key=is_for_coordinator))
        model.kubelets_and_scheduler()
        if len(model.raw_pods) == full - 2:
            model.quota = full - taken
        model.pass_time(3.0)
        assert set(model.query_states().values()) == {"Live"}
    assert model.coordinator().node not in (None, node.name)


def test_a_full_quota_counts_while_each_request_finds_it() -> None:
    ref, now, pods = IncarnationRef("u", "flown/0/8", 1), 0.0, UncreatedPods({})
    for over_quota in (True, True, False, True, True, True):
        pods = pods.with_create_attempt(ref, now, None)
        pods = pods.with_failed_create(ref, "no", now, None, over_quota=over_quota)
        failed_at, now = now, pods.by_ref[ref].retry_at
    assert failed_at == 31.0  # after 1, 2, 4, 8 and 16 s; the one after 3 s found another reason
    assert pods.by_ref[ref].is_over_quota_for(31.0 - 7.0, now)
    assert not pods.by_ref[ref].is_over_quota_for(31.0 - 7.0 + 1.0, now), "none was sent since then"


def test_what_failed_before_a_time_without_requests_is_forgotten() -> None:
    ref, pods = IncarnationRef("u", "flown/0/8", 1), UncreatedPods({})
    for at in (0.0, 1.0, 3.0):
        pods = pods.with_failed_create(ref, "full", at, None, over_quota=True)
    assert not pods.by_ref[ref].is_over_quota_for(3.0, now=60.0)
    pods = pods.with_create_attempt(ref, 60.0, None)
    assert not pods.by_ref[ref].is_over_quota_for(3.0, now=60.0)
    pods = pods.with_failed_create(ref, "full", 60.0, None, over_quota=True)
    assert (pods.by_ref[ref].failures, pods.by_ref[ref].over_quota_since) == (1, 60.0)


@pytest.mark.parametrize("seconds", [0.1, 9.0, 13.0])
def test_requests_that_hang_count_as_others(seconds: float) -> None:
    ref, pods, now = IncarnationRef("u", "flown/0/8", 1), UncreatedPods({}), 0.0
    for failures in range(1, 9):
        pods = pods.with_create_attempt(ref, now, None)
        pods = pods.with_failed_create(ref, "timed out", now + seconds, None)
        assert pods.by_ref[ref].failures == failures
        now = pods.by_ref[ref].retry_at


def test_failures_while_the_predecessor_worked_do_not_count_once_it_is_lost() -> None:
    ref, pods = IncarnationRef("u", names.COORDINATOR_KEY, 2), UncreatedPods({})
    for at in (0.0, 1.0, 3.0, 7.0, 15.0):
        pods = pods.with_create_attempt(ref, at, None)
        pods = pods.with_failed_create(ref, "full", at, None, over_quota=True)
    for at in (16.0, 17.0):
        pods = pods.with_create_attempt(ref, at, 16.0)
        pods = pods.with_failed_create(ref, "full", at, 16.0, over_quota=True)
    assert (pods.by_ref[ref].failures, pods.by_ref[ref].retry_at) == (2, 19.0)


def test_a_forged_pod_in_another_namespace_changes_nothing(running: ModelCluster) -> None:
    """Any user who may create a pod can write an owner reference into it."""
    for role in ("storms", "coordinator"):
        raw = copy.deepcopy(next(r for n, r in running.raw_pods.items() if role in n))
        raw["metadata"] |= {"namespace": "evil", "name": f"x-{role}", "uid": f"u-{role}"}
        raw["metadata"]["resourceVersion"] = str(running.next_version())
        raw["metadata"]["labels"][names.LABEL_INCARNATION] = "900000"
        raw["spec"]["nodeName"], raw["status"] = "gone", {"phase": "Failed"}
        running.raw_pods[f"x-{role}"] = raw
    assert reconcile(running.snapshot(), running.now, running.settings) == []


def test_a_pod_with_the_label_of_another_topology_is_ended(running: ModelCluster) -> None:
    """Its owner says whose it is."""
    raw = copy.deepcopy(next(r for n, r in running.raw_pods.items() if "storms" in n))
    raw["metadata"] |= {"name": "x", "uid": "u-x"}
    raw["metadata"]["labels"][names.LABEL_TOPOLOGY] = "another"
    raw["metadata"]["labels"][names.LABEL_INCARNATION] = "900000"
    running.raw_pods["x"] = raw
    actions = reconcile(running.snapshot(), running.now, running.settings)
    assert [(type(a), getattr(a, "uid", "")) for a in actions] == [
        (DeletePod, "u-x"),
        (EmitEvent, "uid-flights"),
    ]


@pytest.mark.parametrize("forged", [{"namespace": "evil"}, {"labels": "another"}])
def test_a_forged_record_of_a_generation_changes_nothing(
    running: ModelCluster, forged: dict[str, str]
) -> None:
    """It would decide what the operator runs in the namespace of the topology."""
    raw = copy.deepcopy(running.generation_records["flights-g1"])
    meta, record = raw["metadata"], json.loads(raw["data"]["topology.json"])
    meta["namespace"] = forged.get("namespace", meta["namespace"])
    meta["labels"][names.LABEL_TOPOLOGY] = forged.get("labels", "flights")
    meta["labels"][names.LABEL_GENERATION] = "900000"
    record["spec"]["image"] = "evil/image"
    raw["data"]["topology.json"] = json.dumps(record)
    running.generation_records["x"] = raw
    assert reconcile(running.snapshot(), running.now, running.settings) == []


def test_a_node_whose_coordinator_reports_is_not_lost(running: ModelCluster) -> None:
    """The report proves that the node works, although two tasks on it stall."""
    node = running.coordinator().node
    assert node is not None
    assert sum(p.node == node for p in running.tasks().values()) > 1
    running.kill_node_still_ready(node)
    running.dead.clear()  # only its tasks are reported silent
    running.pass_time(4.0)
    assessment = assess_nodes(running.snapshot(), running.now, running.settings.timing)
    assert not assessment.lost_nodes
