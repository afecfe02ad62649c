"""Reconcile: pods that are created, lost and replaced, gates, status; and convergence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from flights_example import flights_spec
from model_cluster import ModelCluster
from prometheus_client import REGISTRY

from rekindle.names import GATE
from rekindle_operator.cluster.model import Taint
from rekindle_operator.metrics import observe, observe_ages
from rekindle_operator.reconcile import recovery_status
from rekindle_operator.reconcile.actions import CreatePod, DeletePod, WriteStatus
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.reconcile.recovery_status import MAX_LOST_NODES

CRDS = Path(__file__).parents[2] / "crds"


def test_without_nodes_every_task_waits_behind_its_gate(cluster: ModelCluster) -> None:
    cluster.settle()
    tasks = cluster.tasks()
    assert len(tasks) == 8
    assert all(p.gates == (GATE,) for p in tasks.values())
    assert set(cluster.query_states().values()) == {"Waiting"}
    assert cluster.condition("Valid")["status"] == "True"
    assert cluster.condition("Ready")["status"] == "False"


def test_with_capacity_for_all_everything_starts_once(
    running: ModelCluster,
) -> None:
    assert set(running.query_states().values()) == {"Live"}
    assert running.status()["redundancy"] == "8/8"
    assert reconcile(running.snapshot(), running.now) == []
    assert "recovery" not in running.status()


def test_metrics_follow_the_cluster(
    running: ModelCluster,
) -> None:
    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"rekindle_operator_{name}", labels)

    observe(running.snapshot())
    observe_ages(running.snapshot(), {"pods": 3.0}, running.now + 2.0)
    assert value("mirror_age_seconds", kind="pods") == 3.0
    assert value("report_age_seconds", topology="default/flights") == 2.0
    live = {"topology": running.topologies["flights"].key, "state": "Live"}
    assert value("task_pods", state="bound") == 8
    assert value("nodes", state="ready") == len(running.nodes)
    assert value("queries", **live) == 3
    for pod in running.raw_pods.values():
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == "8080"
    running.topologies.clear()
    observe(running.snapshot())
    assert value("queries", **live) is None


def test_a_restart_of_the_operator_changes_nothing(running: ModelCluster) -> None:
    running.dry_runs.clear()
    running.quarantined.clear()
    assert reconcile(running.snapshot(), running.now + 1) == []


def test_replicas_of_a_partition_prefer_different_zones(cluster: ModelCluster) -> None:
    for name, zone in (("a", "1"), ("b", "1"), ("c", "2")):
        cluster.add_node(name, labels={"topology.kubernetes.io/zone": zone})
    cluster.settle()
    zones: dict[Any, set[str]] = {}
    for pod in cluster.tasks().values():
        assert pod.slot is not None
        key = pod.slot.segment, pod.slot.partition, pod.segment_name
        zones.setdefault(key, set()).add(cluster.nodes[pod.node or ""].zone)
    assert all(z == {"1", "2"} for k, z in zones.items() if k[2] in ("flown", "alarms"))


def test_pods_of_a_lost_node_are_replaced_and_force_deleted(running: ModelCluster) -> None:
    lost = {p.name for p in running.tasks().values() if p.node == "a"}
    running.kill_node_until_not_ready("a")
    actions = reconcile(running.snapshot(), running.now)
    kinds = [type(a).__name__ for a in actions]
    assert kinds.index("WriteStatus") < kinds.index("CreatePod"), "reserved before it is created"
    assert {a.name for a in actions if isinstance(a, DeletePod) and a.grace_s == 0} >= lost
    running.settle()
    assert all(p.node in ("b", "c") for p in running.tasks().values())
    assert running.status()["redundancy"] == "8/8"
    assert "NodeLost" in running.event_reasons()


def test_surviving_replicas_are_reported_to_take_over(running: ModelCluster) -> None:
    running.kill_node_until_not_ready("a")
    running.settle()
    entry = running.status()["recovery"]["history"][0]
    assert entry["lostNodes"] == ["a"]
    assert "TakeOver" in running.event_reasons()
    assert "RedundancyRestored" in running.event_reasons()


def test_under_a_full_quota_lost_pods_are_still_replaced(running: ModelCluster) -> None:
    running.quota = len(running.raw_pods)
    running.kill_node_until_not_ready("a")
    running.settle()
    assert running.status()["redundancy"] == "8/8"
    assert all(int(name.rpartition("-")[2]) <= 2 for name in running.tasks())


def test_a_pod_refused_for_long_takes_one_incarnation(
    running: ModelCluster,
) -> None:
    running.quota = 0
    victim = running.tasks()["flights-storms-0-0-1"]
    running.raw_pods.pop(victim.name)
    for _ in range(5):
        running.settle()
        running.pass_time(31.0)
    query = next(q for q in running.status()["queries"] if q["name"] == "storm-watch")
    assert query["state"] == "Waiting"
    assert "API server: exceeded quota" in query["waitingFor"]
    assert len(running.status()["recovery"]["history"]) == 1
    running.quota = None
    running.settle()
    assert "flights-storms-0-0-2" in running.tasks()
    assert running.status()["phase"] == "Running"


def test_a_recovery_that_stays_open_lists_no_more_lost_nodes_than_a_status_may(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no status could be written, and no incarnation reserved, any more."""
    monkeypatch.setattr(recovery_status, "MAX_LOST_NODES", 3)
    running.stuck.update(f"flights-routes-0-0-{i}" for i in range(1, 30))
    for number in range(6):
        lost = sorted(n for n in running.nodes if n not in running.dead)[0]
        running.kill_node_until_not_ready(lost)
        running.add_node(f"x{number}")
        running.settle()
        del running.nodes[lost]
    (entry, *_) = running.status()["recovery"]["history"]
    assert "finishedAt" not in entry
    assert entry["lostNodes"] == ["a", "b", "c"]
    crd = yaml.safe_load(next(CRDS.glob("*.yaml")).read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    recovery = schema["properties"]["status"]["properties"]["recovery"]["properties"]
    assert recovery["lostNodes"]["maxItems"] >= MAX_LOST_NODES
    assert recovery["history"]["items"]["properties"]["lostNodes"]["maxItems"] >= MAX_LOST_NODES


def test_a_refused_pod_does_not_keep_others_from_their_nodes(cluster: ModelCluster) -> None:
    cluster.quota = 8  # one less than a coordinator and eight tasks need
    cluster.settle()
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    assert sum(p.node is not None for p in cluster.tasks().values()) == 7


def test_a_refused_coordinator_takes_one_incarnation(running: ModelCluster) -> None:
    running.quota = 0
    running.raw_pods.pop("flights-coordinator-1")
    for _ in range(3):
        running.settle()
        running.pass_time(31.0)
    running.quota = None
    running.settle()
    assert running.coordinator().name == "flights-coordinator-2"
    assert running.event_reasons().count("CoordinatorReplaced") == 1


def test_a_recovery_is_planned_and_has_its_mode(running: ModelCluster) -> None:
    running.kill_node_until_not_ready("a")
    running.kill_node_until_not_ready("b")
    running.settle()
    assert running.status()["recovery"]["history"][0]["mode"] == "Progressive"
    assert "RecoveryPlanned" in running.event_reasons()


def test_a_query_that_an_edit_removes_leaves_the_plan(running: ModelCluster) -> None:
    for name in "abc":
        running.remove_node(name)
    running.settle()
    first, *others = flights_spec()["queries"]
    assert first["name"] in running.status()["recovery"]["plan"]
    running.edit("flights", queries=[{**first, "name": "renamed"}, *others])
    running.settle()
    assert set(running.status()["recovery"]["plan"]) == {"renamed", *(q["name"] for q in others)}


def test_with_capacity_for_one_query_the_densest_comes_back() -> None:
    cluster = ModelCluster()
    cluster.add_topology("flights", flights_spec())
    cluster.add_node("a", cpu_m=560, memory=1800 << 20)  # a coordinator and one task
    cluster.settle()
    states = cluster.query_states()
    assert states["storm-watch"] == "Live", states  # one segment of its own
    assert states["delay-alarms"] == states["route-report"] == "Waiting"


def test_queries_that_wait_start_as_nodes_come(cluster: ModelCluster) -> None:
    live = []
    for number in range(12):
        cluster.add_node(f"n{number}", cpu_m=560, memory=1800 << 20)
        cluster.settle()
        live.append(sum(s == "Live" for s in cluster.query_states().values()))
    assert live == sorted(live), "nothing that runs is preempted"
    assert live[-1] == 3


def test_a_silent_node_is_lost_after_three_seconds(running: ModelCluster) -> None:
    running.kill_node_still_ready("b")
    running.pass_time(2.0)
    assert not [a for a in reconcile(running.snapshot(), running.now) if isinstance(a, CreatePod)]
    running.pass_time(1.5)
    running.settle()
    assert all(p.node != "b" for p in running.tasks().values())
    running.pass_time(30.0)
    running.settle()
    assert all(p.node != "b" for p in running.tasks().values())


def test_a_coordinator_without_responses_proves_no_loss(running: ModelCluster) -> None:
    before = running.tasks()
    for node in "abc":
        running.kill_node_still_ready(node)
    running.dead.clear()
    running.pass_time(11.0)
    running.settle()
    assert running.tasks().keys() == before.keys()


def test_a_task_that_alone_is_silent_is_lost_after_ten_seconds(running: ModelCluster) -> None:
    running.kill_node_still_ready("a")
    running.dead.clear()  # the node's other tasks respond
    victim = next(p for p in running.tasks().values() if p.node == "a")
    assert victim.slot is not None
    of_victim = victim.slot.key
    since = running.suspects_silent_since
    running.suspects_silent_since = {r: at for r, at in since.items() if r.slot == of_victim}
    running.pass_time(9.0)
    running.settle()
    assert victim.name in running.tasks()
    running.pass_time(1.5)
    running.settle()
    assert victim.name not in running.tasks()


def test_a_coordinator_with_an_old_lease_is_replaced_elsewhere(
    running: ModelCluster,
) -> None:
    tasks = set(running.tasks())
    running.now += 7.0  # no Lease is renewed meanwhile
    running.settle()
    assert "flights-coordinator-2" in running.raw_pods
    assert "flights-coordinator-1" not in running.raw_pods
    assert set(running.tasks()) == tasks


def test_the_lease_of_an_earlier_namesake_does_not_count(
    running: ModelCluster,
) -> None:
    (lease,) = running.leases.values()
    running.now += 7.0
    running.leases[lease.name] = replace(lease, owner_uids=frozenset({"uid-before"}))
    actions = reconcile(running.snapshot(), running.now)
    assert not [a for a in actions if isinstance(a, CreatePod)]


def test_room_is_left_for_the_coordinator_on_nodes_with_a_taint(cluster: ModelCluster) -> None:
    bulk = {"key": "bulk", "operator": "Exists"}
    cluster.edit("flights", podTemplate={"spec": {"tolerations": [bulk]}})
    taints = (Taint("bulk", "", "NoSchedule"),)
    cluster.add_node("a", cpu_m=500, memory=8 << 30, taints=taints)  # for one task or a coordinator
    for _ in range(4):  # the scheduler has not bound the coordinator yet
        cluster.apply(reconcile(cluster.snapshot(), cluster.now))
    assert len(cluster.tasks()) == 8
    assert all(p.gates for p in cluster.tasks().values())


def test_no_pod_runs_as_root(running: ModelCluster) -> None:
    assert all(r["spec"]["securityContext"]["runAsNonRoot"] for r in running.raw_pods.values())


def test_a_silent_coordinator_comes_back_on_the_only_node(cluster: ModelCluster) -> None:
    cluster.add_node("a")
    cluster.settle()
    cluster.now += 7.0  # no Lease is renewed meanwhile
    cluster.settle()
    assert cluster.coordinator().name == "flights-coordinator-2"
    assert cluster.coordinator().node == "a"


def test_an_unscheduled_coordinator_is_replaced_once_its_node_is_usable(
    cluster: ModelCluster,
) -> None:
    cluster.add_node("a")
    cluster.settle()
    cluster.remove_node("a")
    cluster.settle()
    assert cluster.coordinator().node is None
    cluster.add_node("a")
    cluster.settle()
    assert cluster.coordinator().node is None, "its affinity still names a"
    cluster.pass_time(5.0)
    cluster.settle()
    assert cluster.coordinator().node == "a"


def test_a_coordinator_without_capacity_is_created_once(
    cluster: ModelCluster,
) -> None:
    cluster.settle()
    for _ in range(4):
        cluster.pass_time(60.0)
        cluster.settle()
    assert cluster.coordinator().name == "flights-coordinator-1"


def test_blocking_recovery_opens_nothing_before_all_fits(cluster: ModelCluster) -> None:
    spec = flights_spec() | {"recovery": {"mode": "Blocking"}}
    cluster.add_topology("flights", spec)
    cluster.add_node("a")
    cluster.settle()
    assert all(p.gates for p in cluster.tasks().values()), "replicas need two nodes"
    cluster.add_node("b")
    cluster.settle()
    assert cluster.status()["phase"] == "Running"


def test_a_deleted_topology_gets_no_pods_and_loses_dead_ones(
    running: ModelCluster,
) -> None:
    running.delete("flights")
    on_a = {p.name for p in running.pods() if p.node == "a"}
    running.kill_node_until_not_ready("a")
    actions = reconcile(running.snapshot(), running.now)
    assert {a.name for a in actions if isinstance(a, DeletePod)} == on_a
    assert all(a.grace_s == 0 for a in actions if isinstance(a, DeletePod))
    assert all(isinstance(a, DeletePod | WriteStatus) for a in actions)


def test_a_terminating_pod_on_a_lost_node_is_ended_by_force(running: ModelCluster) -> None:
    victim = next(p for p in running.tasks().values() if p.node == "a")
    running.kill_node_still_ready("a")
    running.raw_pods[victim.name]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    running.settle()
    assert victim.name in running.tasks(), "its node may still respond"
    assert f"{victim.name[:-1]}2" in running.tasks(), "and yet it is not waited for"
    running.kill_node_until_not_ready("a")
    running.settle()
    assert victim.name not in running.tasks()


def test_a_diverged_replica_is_replaced_once(running: ModelCluster) -> None:
    victim = running.tasks()["flights-alarms-0-1-1"]
    assert victim.slot is not None
    view = running.topologies["flights"]
    report = {**view.data_plane, "diverged": [victim.slot.key]}
    actions = reconcile(_with_report(running, report).snapshot(), running.now, running.settings)
    written = next(a for a in actions if isinstance(a, WriteStatus))
    consistent = next(c for c in written.status["conditions"] if c["type"] == "Consistent")
    assert consistent["reason"] == "Diverged"
    assert "alarms" in consistent["message"]
    running.settle()
    assert "flights-alarms-0-1-2" in running.tasks()
    assert "flights-alarms-0-1-3" not in running.tasks()
    assert "Diverged" in running.event_reasons()


def test_a_disagreement_is_reported_before_a_replica_is_replaced(running: ModelCluster) -> None:
    message = "hourly/0: replicas disagree on epoch 7"
    report = {**running.topologies["flights"].data_plane, "inconsistent": [message]}
    actions = reconcile(_with_report(running, report).snapshot(), running.now, running.settings)
    written = next(a for a in actions if isinstance(a, WriteStatus))
    found = next(c for c in written.status["conditions"] if c["type"] == "Consistent")
    assert (found["status"], found["reason"], found["message"]) == (
        "False",
        "Disagreement",
        message,
    )
    assert not any(isinstance(a, DeletePod) for a in actions)


def _with_report(cluster: ModelCluster, report: dict[str, Any]) -> ModelCluster:
    from dataclasses import replace

    view = cluster.topologies["flights"]
    cluster.topologies["flights"] = replace(view, status={**view.status, "dataPlane": report})
    cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
    cluster.topologies["flights"] = replace(view, status={**view.status, "dataPlane": report})
    return cluster


def test_a_pod_refused_by_kubelets_is_retried_with_back_off(
    running: ModelCluster,
) -> None:
    """No recovery begins for what never ran, and no other pod is planned again for it."""
    running.refused_by_kubelets = "storms"
    name = next(n for n, p in running.tasks().items() if p.segment_name == "storms")
    running.kill_node_until_not_ready(running.tasks()[name].node or "")
    began = running.now
    while running.now - began < 600.0:
        running.settle()
        running.pass_time(10.0)
    tried = [p.incarnation for p in running.tasks().values() if p.segment_name == "storms"]
    assert 6 < max(tried) < 18
    waiting = next(q for q in running.status()["queries"] if q["name"] == "storm-watch")
    assert "SysctlForbidden: no" in waiting["waitingFor"]
    running.refused_by_kubelets = ""
    running.pass_time(100.0)
    running.settle()
    assert running.query_states()["storm-watch"] == "Live"
    assert len(running.status()["recovery"]["history"]) == 1
