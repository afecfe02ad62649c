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
from rekindle_operator.reconcile import core
from rekindle_operator.reconcile.actions import CreatePlaceholder, DeletePod, OpenGate
from rekindle_operator.reconcile.confirm import preconditions_of
from rekindle_operator.reconcile.core import reconcile, reconcile_all
from rekindle_operator.reconcile.placeholders import without_placeholders
from rekindle_operator.reconcile.planning import PlanInput, open_gates
from rekindle_operator.recovery.plan import Plan
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


def run_passes(cluster: ModelCluster, seconds: int) -> int:
    """Two of them a second. How many placeholders they create."""
    created = 0
    for _ in range(2 * seconds):
        cluster.pass_time(0.5)
        actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        created += sum(isinstance(action, CreatePlaceholder) for action in actions)
        cluster.apply(actions)
        cluster.kubelets_and_scheduler()
    return created


def test_one_on_a_lost_node_that_is_still_ready_stays_there() -> None:
    """The scheduler would bind the next one there, too, in each pass."""
    cluster = autoscaled(mode="Blocking")
    for name in "abc":
        cluster.kill_node_still_ready(name)
    assert run_passes(cluster, 25) == len(cluster.tasks())
    bound = {pod.node for pod in placeholders(cluster)}
    assert bound & set("abc")
    assert all(cluster.nodes[name].ready for name in "abc")
    wait(cluster, 30)
    assert not any(cluster.nodes[name].ready for name in "abc")
    assert {pod.node for pod in placeholders(cluster)} == {None}


def test_one_that_a_kubelet_refuses_is_made_again_after_a_while() -> None:
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    refused = placeholders(cluster)
    for pod in refused:
        raw = cluster.raw_pods[pod.name]
        raw["spec"]["nodeName"] = "small"
        raw["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
    assert run_passes(cluster, 10) == 0
    assert run_passes(cluster, 60) == len(refused)


def test_an_operator_that_starts_or_was_paused_deletes_none() -> None:
    """It does not know how long the gated pods have waited."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    before = {pod.uid for pod in placeholders(cluster)}
    assert before
    cluster.pod_times = {}
    cluster.settle()
    wait(cluster)
    assert {pod.uid for pod in placeholders(cluster)} == before


def test_a_full_quota_is_for_the_pods_of_topologies() -> None:
    """Placeholders are deleted where one of these is refused, and not created there."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    cluster.quota = len(cluster.raw_pods) + 3
    run_passes(cluster, 6)
    assert len(placeholders(cluster)) == 3
    cluster.edit("flights", replicas=3)
    run_passes(cluster, 10)
    assert len(cluster.raw_pods) == cluster.quota, "all that the quota allows is there"
    assert placeholders(cluster) == []


def test_replicas_that_need_nodes_of_their_own_have_placeholders_on_as_many() -> None:
    """Else no node comes for the second one."""
    cluster = autoscaled(mode="Blocking")
    lose_all_tasks(cluster)
    wait(cluster)
    cluster.add_node("large", cpu_m=100 * CPU_OF_A_TASK_M, memory=1 << 40)
    wait(cluster)
    assert cluster.query_states() == dict.fromkeys(cluster.query_states(), "Waiting")
    assert {pod.node for pod in placeholders(cluster)} == {"large", None}
    cluster.add_node("another", cpu_m=100 * CPU_OF_A_TASK_M, memory=1 << 40)
    wait(cluster)
    wait(cluster)
    assert set(cluster.query_states().values()) == {"Live"}


def test_their_end_needs_no_reads_of_the_api_server() -> None:
    """A thousand reads, one after the other, would come before all actions of the pass."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    cluster.delete("flights")
    snapshot = cluster.snapshot()
    decisions = reconcile_all(snapshot, cluster.now, cluster.settings)
    ends = [a for d in decisions for a in d.actions if isinstance(a, DeletePod)]
    assert {a.uid for a in ends} == {pod.uid for pod in placeholders(cluster)}
    assert preconditions_of(decisions, snapshot) == []


def test_a_topology_that_cannot_be_decided_on_takes_no_others_placeholders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its gates that the plan would open none is."""

    def broken(plan_input: PlanInput, plan: Plan) -> list[OpenGate]:
        if plan_input.context.view.name == "bad":
            raise RuntimeError("an internal error")
        return open_gates(plan_input, plan)

    cluster = autoscaled(mode="Blocking")
    lose_all_tasks(cluster)
    cluster.add_topology("bad", flights_spec())
    cluster.settle()
    cluster.add_node("new-1", cpu_m=2 * CPU_OF_A_TASK_M + 100)
    monkeypatch.setattr(core, "open_gates", broken)
    wait(cluster)
    assert cluster.condition("Degraded", "bad")["reason"] == "ReconcileFailed"
    assert placeholders(cluster)


def test_a_pod_that_no_node_takes_keeps_no_others_placeholders_away() -> None:
    """Its gate is open nearly always: it waits for a claim, say, and is made again."""
    cluster = autoscaled(mode="Blocking")
    lose_all_tasks(cluster)
    cluster.add_topology("bad", flights_spec())
    cluster.unbound_segments = {pod.segment_name for pod in cluster.tasks().values()}
    cluster.add_node("new-1", cpu_m=2 * CPU_OF_A_TASK_M + 100)
    created = run_passes(cluster, 40)
    assert any(pod.required_node for pod in cluster.tasks("bad").values())
    unbound = [pod for pod in placeholders(cluster) if pod.node is None]
    assert len(unbound) >= len(cluster.tasks()) - 4, "two nodes take two each"
    assert created < 40, "they are made again when its gates are opened, not in each pass"


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
    """The limits are the requests, as the API server requires of devices, and as a quota of limits
    and the default limits of a LimitRange do of all."""
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
        assert "preemptionPolicy" not in raw["spec"], "that of the class"
        (only,) = raw["spec"]["containers"]
        assert only["resources"]["limits"] == only["resources"]["requests"]
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_without_a_class_none_preempts_tasks() -> None:
    """The API server refuses the policy if the cluster's default class has another one."""
    cluster = autoscaled()
    lose_all_tasks(cluster)
    wait(cluster)
    for pod in placeholders(cluster):
        spec = cluster.raw_pods[pod.name]["spec"]
        assert (spec.get("priorityClassName"), spec["preemptionPolicy"]) == (None, "Never")


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
