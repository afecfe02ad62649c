"""Limits of namespaces: priorities, and shares of the capacity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster
from plan_parts import capacity, node, pod, query, started

from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.limits import NamespaceLimits, read_limits
from rekindle_operator.reconcile.events import readable, shortened
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import SpareReplica, make_plan


def limited(**limits: Any) -> ModelCluster:
    cluster = ModelCluster()
    cluster.settings = replace(cluster.settings, limits=NamespaceLimits(**limits))
    cluster.add_topology("flights", flights_spec())
    return cluster


def test_limits_are_read_with_a_default_for_other_namespaces() -> None:
    env = {"REKINDLE_MAX_PRIORITIES": "*=1e+06,a=5", "REKINDLE_MAX_SHARES": "a=0.25"}
    limits = read_limits(env)
    assert [limits.priority(n, 7) for n in ("a", "b")] == [5, 7]
    assert limits.priority("b", 10**9) == 10**6
    assert [limits.max_share(n) for n in ("a", "b")] == [0.25, 1.0]
    assert read_limits({}) == NamespaceLimits()


@pytest.mark.parametrize(
    "env",
    [
        {"REKINDLE_MAX_SHARES": "a=1.5"},
        {"REKINDLE_MAX_SHARES": "a"},
        {"REKINDLE_MAX_PRIORITIES": "a=high"},
        {"REKINDLE_MAX_PRIORITIES": "a=inf"},
    ],
)
def test_a_limit_that_cannot_be_read_stops_the_operator(env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="REKINDLE_MAX"):
        read_limits(env)


def test_a_priority_above_the_limit_is_clamped_and_reported() -> None:
    cluster = limited(priorities={"default": 50})
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    message = cluster.condition("Valid")["message"]
    assert "priorities above the namespace's limit count as 50" in message
    accepted = [e.note for e in cluster.events if e.reason == "Accepted"]
    assert "count as 50" in accepted[0]


def live_beside_a_greedy_namespace(**limits: Any) -> int:
    """Queries of `flights` that run where there is no capacity for both topologies."""
    cluster = limited(**limits)
    spec = flights_spec()
    for entry in spec["queries"]:
        entry["priority"] = 1_000_000
    cluster.add_topology("greedy", spec)
    cluster.topologies["greedy"] = replace(cluster.topologies["greedy"], namespace="greedy")
    for name in "ab":
        cluster.add_node(name, cpu_m=2400)
    cluster.settle()
    return list(cluster.query_states("flights").values()).count("Live")


def test_a_clamped_priority_does_not_displace_others() -> None:
    assert live_beside_a_greedy_namespace(priorities={"greedy": 1}) == 3
    assert live_beside_a_greedy_namespace() < 3


def test_a_namespace_over_its_share_waits_and_has_a_reason() -> None:
    cluster = limited(shares={"default": 0.25})
    for name in "ab":
        cluster.add_node(name, cpu_m=4000)
    cluster.settle()
    used = sum(p.requests.cpu_m for p in cluster.pods() if p.node or p.required_node)
    assert 0 < used <= 2000
    waits = [q["waitingFor"] for q in cluster.status()["queries"] if q["state"] == "Waiting"]
    assert waits
    assert any("the namespace has used its share of the cluster" in w for w in waits)
    cluster.settings = replace(cluster.settings, limits=NamespaceLimits())
    cluster.settle()
    assert cluster.status()["phase"] == "Running"


def test_a_blocking_topology_over_its_share_has_a_reason() -> None:
    cluster = limited(shares={"default": 0.1})
    cluster.edit("flights", recovery={"mode": "Blocking"})
    for name in "ab":
        cluster.add_node(name)
    cluster.settle()
    waits = [q["waitingFor"] for q in cluster.status()["queries"]]
    assert all("the namespace has used its share of the cluster" in w for w in waits)


def shared(of: Capacity, **left: ResourceAmounts) -> Capacity:
    """The capacity `of`, and what each namespace has left of its share."""
    return Capacity(of.nodes, of.allocatable, left)


def test_a_used_up_share_delays_no_replicas_of_others() -> None:
    pods = {"a": replace(pod("a", 4), namespace="small")}
    spare = SpareReplica(pod("spare", 1, group="run", replica=1), priority=5)
    nodes = shared(capacity(node("n", 9)), small=ResourceAmounts(2, 100, 10))
    plan = make_plan([query("Q", 1, "a")], pods, [spare], nodes)
    assert dict(plan.nodes) == {"spare": "n"}
    assert plan.over_namespace_limit == {("ns/t", "Q")}


def test_a_pod_over_the_share_of_its_namespace_says_so() -> None:
    nodes = shared(capacity(node("n", 9)), small=ResourceAmounts(2, 100, 10))
    spare = replace(pod("s", 3), namespace="small")
    plan = make_plan([], {}, [SpareReplica(spare, 1)], nodes)
    assert "the namespace has used its share" in plan.unplaced["s"]


def test_queries_of_a_namespace_share_its_limit() -> None:
    pods = {n: replace(pod(n, 2), namespace="small") for n in ("a", "b")} | {"c": pod("c", 2)}
    queries = [query("A", 9, "a"), query("B", 8, "b"), query("C", 1, "c")]
    nodes = shared(capacity(node("n", 9)), small=ResourceAmounts(3, 100, 10))
    plan = make_plan(queries, pods, [], nodes)
    assert sorted(started(plan)) == ["A", "C"]
    assert plan.over_namespace_limit == {("ns/t", "B")}


@pytest.mark.parametrize(
    ("density", "text"),
    [
        (4.66e-08, "< 0.001"),
        (0.0, "0"),
        (12.3456, "12.3"),
        (123456.7, "123,457"),
        (float("inf"), "unlimited: nothing is missing"),
    ],
)
def test_densities_are_readable(density: float, text: str) -> None:
    assert readable(density) == text


def test_a_density_without_any_node_compares_priorities() -> None:
    plan = make_plan([query("A", 30, "a")], {"a": pod("a", 500, 1 << 30)}, [], capacity())
    missing_units = 3  # all of each resource: CPU, memory, pods
    assert plan.waiting[0].density == 30 / missing_units


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u20ac", "\U0001f525"])
def test_a_note_is_cut_at_whole_characters_within_a_kibibyte(letter: str) -> None:
    assert shortened(letter * 250) == letter * 250
    cut = shortened(letter * 2000)
    assert 1020 < len(cut.encode()) <= 1024
    assert cut.strip(letter) == " ..."
