"""Placeholders: what a cluster autoscaler sees of waiting queries, and that they keep no pod out.

The model cluster's scheduler binds them like any pod, and asserts that a planned pod fits.

Design: docs/design/recovery.md#placeholders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.cluster.convert import pod_requests
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.placeholders import without_placeholders
from rekindle_operator.settings import PodDefaults

CPU_OF_A_TASK_M = 500


def autoscaled(**recovery: Any) -> ModelCluster:
    made = ModelCluster()
    spec = flights_spec() | {"recovery": {"autoscale": True, **recovery}}
    made.add_topology("flights", spec)
    for name in "abc":
        made.add_node(name)
    made.add_node("small", cpu_m=CPU_OF_A_TASK_M - 100)  # for the coordinator alone
    made.settle()
    assert made.query_states() == dict.fromkeys(made.query_states(), "Live")
    return made


def placeholders(cluster: ModelCluster) -> list[PodView]:
    return [pod for pod in cluster.pods() if pod.role == names.ROLE_PLACEHOLDER]


def lose_all_tasks(cluster: ModelCluster) -> None:
    for name in "abc":
        cluster.kill_node_until_not_ready(name)
    cluster.settle()
    assert all(pod.node is None for pod in cluster.tasks().values())


def wait(cluster: ModelCluster, seconds: float = 6.0) -> None:
    cluster.pass_time(seconds)
    cluster.settle()


@pytest.mark.parametrize("mode", ["Progressive", "Blocking"])
def test_what_waiting_queries_lack_has_placeholders(mode: str) -> None:
    """One for each partition that they need, with its requests; after some seconds."""
    cluster = autoscaled(mode=mode)
    lose_all_tasks(cluster)
    assert placeholders(cluster) == []
    wait(cluster)
    found = placeholders(cluster)
    partitions = {(p.slot.segment, p.slot.partition) for p in cluster.tasks().values() if p.slot}
    gated = len(cluster.tasks()) if mode == "Blocking" else len(partitions)
    assert len(found) == gated
    assert all(p.name.removesuffix("-placeholder") in cluster.tasks() for p in found)
    assert {p.requests.cpu_m for p in found} == {CPU_OF_A_TASK_M}
    assert all(not p.gates and p.topology is None for p in found)


def test_without_autoscale_there_are_none() -> None:
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    assert placeholders(cluster)
    cluster.edit("flights", recovery={"autoscale": False})
    cluster.settle()
    assert placeholders(cluster) == []


def test_one_that_is_bound_gives_way_to_a_planned_pod() -> None:
    """The nodes are full of them when the plan opens gates there."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    cluster.add_node("new-1", cpu_m=4 * CPU_OF_A_TASK_M)
    cluster.kubelets_and_scheduler()
    cluster.kubelets_and_scheduler()
    assert [p for p in placeholders(cluster) if p.node == "new-1"], "the scheduler is faster"
    cluster.settle()
    assert "Live" in cluster.query_states().values()
    cluster.add_node("new-2")
    wait(cluster)
    wait(cluster)
    assert set(cluster.query_states().values()) == {"Live"}
    assert placeholders(cluster) == []


def test_one_on_a_lost_node_is_made_again() -> None:
    """The autoscaler does not see it there."""
    cluster = autoscaled(mode="Blocking")
    lose_all_tasks(cluster)
    wait(cluster)
    cluster.add_node("new-1", cpu_m=CPU_OF_A_TASK_M + 100)
    wait(cluster)
    (bound,) = (p for p in placeholders(cluster) if p.node == "new-1")
    cluster.nodes["new-1"] = replace(cluster.nodes["new-1"], cordoned=True)
    cluster.settle()
    (again,) = (p for p in placeholders(cluster) if p.name == bound.name)
    assert again.node is None


def test_a_suspended_or_deleted_topology_has_none() -> None:
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    cluster.edit("flights", suspend=True)
    cluster.settle()
    assert placeholders(cluster) == []


def test_one_of_another_namespace_is_a_pod_like_any_other() -> None:
    """Anyone can write an owner of another namespace into a pod, which would use what counts as
    free."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    snapshot = cluster.snapshot()
    others, found = without_placeholders(snapshot)
    assert {p.uid for p in found} == {p.uid for p in placeholders(cluster)}
    assert len(others.pods) + len(found) == len(snapshot.pods)
    forged = tuple(replace(pod, namespace="elsewhere") for pod in snapshot.pods)
    assert without_placeholders(replace(snapshot, pods=forged)) == (
        replace(snapshot, pods=forged),
        (),
    )


def test_a_placeholder_asks_for_what_its_pod_does() -> None:
    """Of devices the limit is the request, as the API server requires."""
    cluster = ModelCluster()
    cluster.settings = replace(cluster.settings, pods=PodDefaults(placeholder_class="lowest"))
    container = {"name": "task", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    container["resources"]["limits"] = {"nvidia.com/gpu": "1"}  # type: ignore[index]
    template = {"spec": {"containers": [container], "nodeSelector": {"zone": "z"}}}
    template["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    spec = flights_spec() | {"recovery": {"autoscale": True}, "podTemplate": template}
    cluster.add_topology("flights", spec)
    cluster.settle()
    wait(cluster)
    found = {name: raw for name, raw in cluster.raw_pods.items() if name.endswith("-placeholder")}
    assert found
    for name, raw in found.items():
        gated = cluster.raw_pods[name.removesuffix("-placeholder")]
        assert pod_requests(raw["spec"]) == pod_requests(gated["spec"])
        assert raw["spec"]["nodeSelector"] == {"zone": "z"}
        assert {"key": "gpu", "operator": "Exists"} in raw["spec"]["tolerations"]
        assert raw["spec"]["priorityClassName"] == "lowest"
        (only,) = raw["spec"]["containers"]
        assert only["resources"]["limits"] == {"nvidia.com/gpu": "1"}


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=6))
@settings(max_examples=15, deadline=None)
def test_placeholders_keep_no_pod_out(nodes: list[tuple[int, bool]]) -> None:
    """Nodes of any size come, before or after the scheduler has bound placeholders there: with room
    for all, all queries are live, and no placeholder is left."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    for number, (tasks, scheduler_first) in enumerate([*nodes, (8, True), (8, False)]):
        cluster.add_node(f"new-{number}", cpu_m=tasks * CPU_OF_A_TASK_M + 100)
        for _ in range(2 * scheduler_first):
            cluster.kubelets_and_scheduler()
        cluster.settle()
        wait(cluster)
        names_of = {p.name.removesuffix("-placeholder") for p in placeholders(cluster)}
        assert names_of <= {name for name, pod in cluster.tasks().items() if pod.node is None}
    wait(cluster)
    assert set(cluster.query_states().values()) == {"Live"}
    assert placeholders(cluster) == []
