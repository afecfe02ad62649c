"""`rekindle plan`: what would happen to topologies if nodes were lost or added."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from flights_example import flights_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle.errors import RekindleError
from rekindle_operator.what_if import what_if

NODES = ("a", "b", "c", "d")


def topology(name: str = "flights", spec: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "kind": "StreamTopology",
        "metadata": {"name": name},
        "spec": spec or flights_spec(),
    }


def node(name: str, cpu: str = "2", memory: str = "4Gi", **more: Any) -> dict[str, Any]:
    allocatable = {"cpu": cpu, "memory": memory}
    return {
        "kind": "Node",
        "metadata": {"name": name},
        "status": {"allocatable": allocatable},
    } | more


def lines(*lost: str, added: tuple[dict[str, str], ...] = (), nodes: Any = NODES) -> list[str]:
    return what_if([topology()], [node(name) for name in nodes], [], lost, added)


def test_without_a_loss_every_query_goes_on() -> None:
    assert lines() == [
        "flights/delay-alarms goes on (priority 100)",
        "flights/storm-watch goes on (priority 50)",
        "flights/route-report goes on (priority 10)",
        "0 of 8 replicas have no node",
    ]


def test_what_comes_back_and_what_waits_for_what_is_told() -> None:
    found = lines("a", "b", "c")
    assert found[0] == "1. flights/storm-watch comes back (priority 50): storms/0/0 on d"
    waits = (
        "-  flights/delay-alarms waits (priority 100) for alarms/0/0: cpu 500m: too little is free"
    )
    assert found[1].startswith(waits)
    assert found[2].endswith(" for flown/0/0: cpu 500m: too little is free, on 1 node")
    assert found[3] == "5 of 8 replicas have no node"


def test_added_nodes_bring_the_rest_back() -> None:
    found = lines("a", "b", "c", added=({"cpu": "4", "memory": "8Gi"},) * 2)
    assert not any(" waits " in line for line in found)
    assert any("on added-1" in line for line in found)
    assert found[-1] == "0 of 8 replicas have no node"


def test_a_node_that_is_cordoned_or_not_ready_takes_nothing() -> None:
    not_ready = {"allocatable": {"cpu": "2", "memory": "4Gi"}}
    not_ready["conditions"] = [{"type": "Ready", "status": "False"}]  # type: ignore[assignment]
    nodes = [node("a"), node("b", spec={"unschedulable": True}), node("c", status=not_ready)]
    found = what_if([topology()], nodes, [], [], [])
    assert not any("on b" in line or "on c" in line for line in found)
    assert any(" waits " in line for line in what_if([topology()], nodes, [], ["a"], []))


@pytest.mark.parametrize(
    ("lost", "raw", "message"),
    [
        (["z"], {}, "there is no node z: there is a, b, c, d"),
        ([], {"metadata": {}}, "has no metadata.name"),
        ([], {"spec": {"queries": []}}, "default/flights: "),
    ],
)
def test_what_cannot_be_planned_is_named(
    lost: list[str], raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(RekindleError, match=message):
        what_if([topology() | raw], [node(name) for name in NODES], [], lost, [])


@given(st.sets(st.sampled_from(NODES)), st.integers(0, 2))
@settings(max_examples=30)
def test_a_node_holds_no_more_than_it_has(lost: set[str], added: int) -> None:
    """Four tasks each, and every query is explained."""
    found = lines(*lost, added=({"cpu": "2", "memory": "4Gi"},) * added)
    placed = {
        part for line in found if " comes back " in line for part in line.split(": ")[1].split(", ")
    }
    assert max(Counter(p.split(" on ")[1] for p in placed).values(), default=0) <= 4
    for query in ("delay-alarms", "storm-watch", "route-report"):
        assert sum(f"flights/{query} " in line for line in found) == 1


def a_full_cluster(checkpoint_epoch: int | None) -> ModelCluster:
    cluster = ModelCluster()
    cluster.checkpoint_epoch = checkpoint_epoch
    cluster.add_topology("flights", flights_spec())
    for name in NODES:
        cluster.add_node(name, cpu_m=1100, memory=3700 << 20)
    cluster.settle()
    return cluster


def plan_of(cluster: ModelCluster, lost: list[str], **changes: Any) -> list[str]:
    """As `rekindle plan` finds its objects. `changes`: of the spec."""
    view = cluster.topologies["flights"]
    meta = {"name": "flights", "namespace": view.namespace, "uid": view.uid}
    raw = topology(spec=flights_spec() | changes) | {"metadata": meta, "status": dict(view.status)}
    nodes = [node(name, "1100m", "3700Mi") for name in NODES]
    return what_if([raw], nodes, list(cluster.raw_pods.values()), lost, [])


@pytest.mark.parametrize("checkpoint_epoch", [40, None])
def test_tasks_of_a_cluster_stay_where_they_are(checkpoint_epoch: int | None) -> None:
    """The answer is what the operator does then: it takes away no task without a checkpoint."""
    cluster = a_full_cluster(checkpoint_epoch)
    found = plan_of(cluster, ["a", "b", "c"])
    for name in ("a", "b", "c"):
        cluster.kill_node_until_not_ready(name)
    cluster.settle()
    for _ in range(4):
        cluster.pass_time(3.0)
        cluster.settle()
    taken = ["routes/0/0"] if checkpoint_epoch is not None else []
    told = [line for line in found if " is taken away: " in line]
    assert told == [f"{name} is taken away: storm-watch needs its capacity" for name in taken]
    assert [e.note.split(" on ")[0] for e in cluster.events if e.reason == "Preempted"] == taken
    live = {name for name, state in cluster.query_states().items() if state == "Live"}
    assert {name for name in cluster.query_states() if not _waits(found, name)} == live
    assert len(live) == len(taken)


def test_placeholders_use_nothing() -> None:
    """What they stand for is placed where they are."""
    cluster = a_full_cluster(40)
    cluster.edit("flights", recovery={"autoscale": True})
    for name in ("a", "b", "c"):
        cluster.kill_node_until_not_ready(name)
    cluster.settle()
    cluster.pass_time(6.0)
    cluster.settle()
    raws = [raw for name, raw in cluster.raw_pods.items() if name.endswith("-placeholder")]
    assert raws
    found = plan_of(cluster, [])  # all nodes take tasks again
    assert any(" comes back " in line for line in found)
    for raw, name in zip(raws, "aabbcc", strict=False):
        raw["spec"]["nodeName"] = name
    assert plan_of(cluster, []) == found
    for raw in raws:
        raw["metadata"]["ownerReferences"][0]["uid"] = "another one's"
    assert plan_of(cluster, []) != found


def test_what_is_suspended_misses_nothing() -> None:
    """Its tasks that still end leave their capacity to the others."""
    cluster = a_full_cluster(40)
    found = plan_of(cluster, ["a", "b", "c"], suspend=True)
    assert found == ["flights is suspended: it has no tasks", "0 of 0 replicas have no node"]


def _waits(found: list[str], query: str) -> bool:
    return any(f"flights/{query} waits" in line for line in found)


WRONG: tuple[Any, ...] = (3, -1, "x", "1e999999", float("nan"), [1], {"x": 1}, [{}], None, True)


def changed(document: Any) -> Iterator[Any]:
    """The document with one part of it replaced, each part by each wrong value."""
    yield from WRONG
    parts = document.items() if isinstance(document, dict) else enumerate(document)
    for key, part in list(parts) if isinstance(document, dict | list) else ():
        for wrong in changed(part) if isinstance(part, dict | list) else WRONG:
            copied = copy.copy(document)
            copied[key] = wrong
            yield copied


def test_a_manifest_with_any_wrong_part_is_planned_or_refused() -> None:
    """Files are written by hand: what cannot be read is named, and nothing fails in between."""
    whole = node("a") | {
        "spec": {"unschedulable": False, "taints": [{"key": "k", "effect": "NoSchedule"}]}
    }
    whole["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    whole["metadata"] |= {"labels": {"zone": "z"}, "annotations": {"a": "b"}}
    for wrong in changed(whole):
        if isinstance(wrong, dict):
            with suppress(RekindleError):
                what_if([], [wrong, node("b")], [], [], [])
    given = topology()
    for wrong in changed(given["metadata"]):
        with suppress(RekindleError):
            what_if([given | {"metadata": wrong}], [], [], [], [])
    for wrong in WRONG:
        with suppress(RekindleError):
            what_if([given | {"spec": wrong}], [], [], [], [])


def test_a_topology_that_recovers_as_a_whole_is_refused() -> None:
    """Its queries do not come back one by one, as a plan would say."""
    blocking = topology(spec=flights_spec() | {"recovery": {"mode": "Blocking"}})
    with pytest.raises(RekindleError, match=r"default/flights: recovery\.mode is Blocking"):
        what_if([blocking], [node("a")], [], [], [])
