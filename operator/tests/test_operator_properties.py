"""Property tests: I6, I7, I8 and convergence under random sequences of failures and edits.

The model cluster asserts I6 at each binding, that no pod name is used twice and that no pod is
created before its incarnation is reserved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec, with_replicas
from hypothesis import example, given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle.names import GATE
from rekindle_operator.cluster.amounts import total
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.recovery.losses import assess_nodes
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build

pytestmark = pytest.mark.simulated

_LARGE = (4000, 8 << 30)  # a node's CPU in millicores, and its memory
_SIZES = st.sampled_from([(560, 1800 << 20), (1200, 3 << 30), _LARGE])
_NODES = st.sampled_from("abcd")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _NODES, _SIZES),
        st.tuples(st.just("kill, not Ready"), _NODES),
        st.tuples(st.just("remove"), _NODES),
        st.tuples(st.just("kill, still Ready"), _NODES),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 2.0, 4.0, 11.0, 70.0])),
        st.tuples(st.just("bind"), st.booleans()),
        st.tuples(st.just("suspend"), st.booleans()),
        st.tuples(st.just("standbys"), st.integers(0, 2)),
        st.tuples(st.just("cordon"), _NODES),
        st.tuples(st.just("second"), st.sampled_from(["Progressive", "Blocking"])),
        st.tuples(st.just("drop"), st.integers(0, 40)),
        st.tuples(st.just("quota"), st.sampled_from([None, 0, 5, 9])),
        st.tuples(st.just("image"), st.sampled_from(["one", "two"])),
        st.tuples(st.just("replicas"), st.integers(1, 3)),
        st.tuples(st.just("kubelets refuse"), st.sampled_from(["", "storms", "flown"])),
    ),
    max_size=8,
)


_NEEDS_A_TARGET = (
    "add",
    "kill, not Ready",
    "kill, still Ready",
    "remove",
    "second",
    "cordon",
    "drop",
)
"""Steps that do nothing if their target is not there, or is there already."""


def _do(cluster: ModelCluster, step: tuple[Any, ...]) -> None:
    match step:
        case ("add", name, (cpu_m, memory)) if name not in cluster.nodes:
            cluster.add_node(name, cpu_m, memory)
        case ("kill, not Ready", name) if name in cluster.nodes:
            cluster.kill_node_until_not_ready(name)
        case ("kill, still Ready", name) if name in cluster.nodes:
            cluster.kill_node_still_ready(name)
        case ("remove", name) if name in cluster.nodes:
            cluster.remove_node(name)
        case ("pass", seconds):
            cluster.pass_time(seconds)
        case ("bind", value):
            cluster.binding = value
        case ("image", value):
            cluster.edit("flights", image=value)
        case ("replicas", number):
            cluster.edit("flights", **with_replicas(number))
        case ("kubelets refuse", segment):
            cluster.refused_by_kubelets = segment
        case ("quota", value):
            cluster.quota = value
        case ("standbys", number):
            cluster.edit("flights", recovery={"standby": number})
        case ("suspend", value):
            cluster.edit("flights", suspend=value)
        case ("second", mode) if "second" not in cluster.topologies:
            spec = flights_spec() | {"recovery": {"mode": mode}}
            cluster.add_topology("second", spec)
        case ("cordon", name) if name in cluster.nodes:
            view = cluster.nodes[name]
            fresh = replace(view, cordoned=not view.cordoned, version=cluster.next_version())
            cluster.nodes[name] = fresh
        case ("drop", number) if cluster.raw_pods:
            cluster.raw_pods.pop(sorted(cluster.raw_pods)[number % len(cluster.raw_pods)])
        case _:
            assert step[0] in _NEEDS_A_TARGET, f"unknown step {step}"


@copy_of_one_build
def _started(skew_s: float = 0.0) -> ModelCluster:
    """The topology, without any node. `skew_s`: how far clocks of other machines are ahead."""
    made = ModelCluster()
    made.api_and_kubelets_ahead_s = skew_s
    made.add_topology("flights", flights_spec())
    made.settle()
    return made


_SKEWS_S = st.sampled_from([-3600.0, -20.0, 20.0, 3600.0])


@given(steps=_STEPS, skew_s=_SKEWS_S)
@example(
    steps=[
        ("second", "Progressive"),
        ("add", "a", (560, 1800 << 20)),
        ("kubelets refuse", "storms"),
        ("add", "b", (560, 1800 << 20)),
    ],
    skew_s=20.0,
)
@example(
    steps=[
        ("second", "Progressive"),
        ("quota", 0),
        ("add", "b", (560, 1800 << 20)),
        ("kill, not Ready", "b"),
        ("add", "a", (560, 1800 << 20)),
    ],
    skew_s=20.0,
)
@example(
    steps=[("add", "a", _LARGE), ("add", "b", _LARGE), ("cordon", "a"), ("bind", False)],
    skew_s=-3600.0,
)
def test_reconcile_converges_and_the_invariants_hold(steps: Any, skew_s: float) -> None:
    """Another cluster, in which other machines have other clocks, does the same at every step."""
    cluster, skewed = _started(), _started(skew_s)
    for step in steps:
        _take(step, cluster, skewed)
        _check_no_slot_is_on_a_lost_node(cluster)
        _check_capacity(cluster)
    assert reconcile(cluster.snapshot(), cluster.now, cluster.settings) == []
    _check_no_single_task_query_fits(cluster)
    for seconds in (3.0, 70.0):
        _take(("pass", seconds), cluster, skewed)
    _check_recovery(cluster)


def _take(step: tuple[Any, ...], cluster: ModelCluster, skewed: ModelCluster) -> None:
    for each in (cluster, skewed):
        _do(each, step)
        each.settle()
    exact, other = ({p.name: p.node for p in c.pods()} for c in (cluster, skewed))
    assert exact == other, f"by the clocks of other machines: {step}"


def _check_recovery(cluster: ModelCluster) -> None:
    """Once there are enough nodes."""
    cluster.binding = True
    cluster.quota = None
    cluster.refused_by_kubelets = ""
    cluster.edit("flights", suspend=False)
    for name in ("x", "y", "z"):
        cluster.add_node(name, cpu_m=16_000, memory=64 << 30)
    for _ in range(4):
        cluster.settle()
        if all(cluster.status(name)["phase"] == "Running" for name in cluster.topologies):
            break
        cluster.pass_time(61.0)
    cluster.settle()
    for name in cluster.topologies:
        assert set(cluster.query_states(name).values()) == {"Live"}
        assert cluster.condition("Redundant", name)["status"] == "True"
        assert cluster.condition("Recovering", name)["status"] == "False"


def _check_no_slot_is_on_a_lost_node(cluster: ModelCluster) -> None:
    """I7: the newest incarnation of each slot is on a node that is not known to be lost."""
    lost = assess_nodes(cluster.snapshot(), cluster.now, cluster.settings.timing).lost_nodes
    for topology in cluster.topologies:
        newest: dict[Any, Any] = {}
        for pod in cluster.tasks(topology).values():
            if pod.incarnation > getattr(newest.get(pod.slot), "incarnation", 0):
                newest[pod.slot] = pod
        assert not [p.name for p in newest.values() if p.node in lost or p.required_node in lost]


def _check_capacity(cluster: ModelCluster) -> None:
    """I6: bound tasks and tasks with an open gate fit. (The scheduler places coordinators.)"""
    for name, node in cluster.nodes.items():
        here = [p for p in cluster.pods() if name in (p.node, p.required_node) and not p.ended]
        coordinators = [p for p in here if p.role == "coordinator"]
        tasks = [p for p in here if p not in coordinators]
        if tasks:
            assert node.allocatable.covers(total(p.requests for p in tasks)), name


def _check_no_single_task_query_fits(cluster: ModelCluster) -> None:
    """I8, seen from outside: storm-watch is one task, so any node would do that has capacity for it
    and has not refused a pod of its shape."""
    snapshot = cluster.snapshot()
    usable = assess_nodes(snapshot, cluster.now, cluster.settings.timing).usable_nodes
    # Capacity is left for a coordinator without a node, be it that a quota refuses its pod.
    placed = {p.topology for p in snapshot.pods if p.role == "coordinator" and p.node}
    unplaced = cluster.topologies.keys() - placed
    for topology in cluster.topologies:
        if topology == "second" or cluster.query_states(topology).get("storm-watch") != "Waiting":
            continue
        gated = [p for p in cluster.tasks(topology).values() if p.segment_name == "storms"]
        if not gated or GATE not in gated[0].gates:
            continue
        for name in usable.keys() - snapshot.unsuitable.get(gated[0].shape, frozenset()):
            node = usable[name]
            here = [p for p in snapshot.pods if name in (p.node, p.required_node)]
            left = node.allocatable - total(p.requests for p in here)
            assert unplaced or not left.covers(gated[0].requests), f"it fits on {name}"
