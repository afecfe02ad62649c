"""Pods with an open gate that no node takes, and pods that were never created."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_operator.cluster.uncreated_pods import UncreatedPods
from rekindle_operator.reconcile.core import reconcile_all
from rekindle_operator.reconcile.schedule import schedule

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def opened(cluster: ModelCluster, topology: str = "flights") -> dict[str, str | None]:
    """Pods whose gate is open and that no node took, and the node that each is for."""
    tasks = cluster.tasks(topology).values()
    return {p.name: p.required_node for p in tasks if p.node is None and not p.gates}


def test_an_unbound_pod_is_planned_again(cluster: ModelCluster) -> None:
    cluster.binding = False
    cluster.add_node("a")
    cluster.add_node("b")
    cluster.settle()
    assert all(not p.gates for p in cluster.tasks().values())
    cluster.pass_time(5.0)
    cluster.settle()
    assert all(name.endswith("-2") for name in cluster.tasks())
    cluster.pass_time(5.0)
    cluster.settle()
    assert all(name.endswith("-2") for name in cluster.tasks()), "the timeout has doubled"


def test_a_loss_replaces_only_unbound_pods_for_lost_nodes(running: ModelCluster) -> None:
    running.binding = False
    for name in "bc":
        running.nodes[name] = replace(running.nodes[name], cordoned=True)
    for name in "de":
        running.add_node(name, cpu_m=1000)  # for one task
    running.kill_node_until_not_ready("a")
    running.settle()
    before = opened(running)
    assert set(before.values()) == {"d", "e"}
    running.kill_node_until_not_ready("d")
    running.settle()
    after = opened(running)
    assert {n for n, node in before.items() if node == "e"} == set(after)
    assert set(after.values()) == {"e"}


def test_a_failing_topology_replaces_no_pods_of_others(running: ModelCluster) -> None:
    """None of its actions succeeds, so its losses look new in each pass."""
    running.kill_node_until_not_ready("a")
    for name in "de":
        running.add_node(name, cpu_m=8000)
    running.add_topology("other", flights_spec())
    running.binding = False

    def pass_without_flights() -> None:
        decisions = reconcile_all(running.snapshot(), running.now, running.settings)
        steps = schedule(t for t in decisions if not t.topology_key.endswith("/flights"))
        running.apply(step.action for step in steps)

    for _ in range(5):
        pass_without_flights()
    gates = opened(running, "other")
    assert len(gates) == 8
    for _ in range(20):
        pass_without_flights()
        running.pass_time(0.1)
    assert opened(running, "other") == gates


def test_a_failed_create_at_first_start_is_no_loss(cluster: ModelCluster) -> None:
    for name in "abc":
        cluster.add_node(name)
    cluster.quota = 1
    cluster.settle()
    for _ in range(4):
        cluster.pass_time(31.0)
        cluster.settle()
    assert cluster.status()["phase"] == "Starting"
    assert "recovery" not in cluster.status()
    cluster.quota = None
    cluster.pass_time(31.0)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    assert {s["incarnation"] for s in cluster.status()["slots"]} == {1}


def test_pods_never_created_are_no_loss_after_a_restart(cluster: ModelCluster) -> None:
    """The operator reserved their incarnations, and died before it created them."""
    for name in "abc":
        cluster.add_node(name)
    cluster.quota = 0
    cluster.settle()
    cluster.quota, cluster.uncreated_pods = None, UncreatedPods({})
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    assert "recovery" not in cluster.status()
    assert "RecoveryPlanned" not in cluster.event_reasons()


def with_greedy(cluster: ModelCluster, **more: Any) -> None:
    """A topology in another namespace, whose queries all have a higher priority."""
    spec = {**flights_spec(), **more}
    for query in spec["queries"]:
        query["priority"] = 1_000_000
    cluster.add_topology("greedy", spec)
    cluster.topologies["greedy"] = replace(cluster.topologies["greedy"], namespace="greedy")


def test_refused_pods_reserve_no_capacity(cluster: ModelCluster) -> None:
    with_greedy(cluster)
    cluster.refused_in = {"greedy"}
    for name in "ab":
        cluster.add_node(name, cpu_m=2400)
    cluster.settle()
    cluster.pass_time(2.0)
    cluster.settle()
    assert set(cluster.query_states("flights").values()) == {"Live"}
    assert cluster.status()["redundancy"] > "5/8", (
        "refused pods take none from second replicas of other topologies either"
    )
    cluster.refused_in = set()
    cluster.add_node("c", cpu_m=4000)
    for _ in range(2):  # the coordinator's pod is created first
        cluster.pass_time(31.0)
        cluster.settle()
    assert set(cluster.query_states("greedy").values()) == {"Live"}


def test_a_gated_pod_with_a_required_node_uses_no_capacity(cluster: ModelCluster) -> None:
    fields = [{"key": "metadata.name", "operator": "In", "values": ["a"]}]
    never = [{"key": "no-such-label", "operator": "Exists"}]
    term = {"matchFields": fields, "matchExpressions": never}
    required = {REQUIRED: {"nodeSelectorTerms": [term]}}
    with_greedy(
        cluster,
        podTemplate={"spec": {"affinity": {"nodeAffinity": required}}},
        resources={"requests": {"cpu": "3"}},
    )
    cluster.add_node("a")
    cluster.settle()
    assert {p.required_node for p in cluster.tasks("greedy").values()} == {"a"}
    assert set(cluster.query_states("flights").values()) == {"Live"}
