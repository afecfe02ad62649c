"""Parts of a query start before there is capacity for all of it, if it may answer tentatively.

Design: docs/design/recovery.md#tentative-start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from hypothesis import given
from hypothesis import strategies as st
from model_cluster import ModelCluster
from plan_parts import capacity, node, pod, query, started

from rekindle_operator.recovery.plan import SpareReplica, make_plan

PODS = {n: pod(n, cpu) for n, cpu in (("left", 1), ("right", 3), ("both", 1), ("other", 4))}
PATHS = (("left", "both"), ("right", "both"))
NEEDS = ("left", "right", "both")

# --- the plan ---


def test_with_one_path_a_query_starts_in_part() -> None:
    plan = make_plan([query("Q", 1, *NEEDS, paths=PATHS)], PODS, [], capacity(node("n", 3)))
    assert dict(plan.nodes) == {"left": "n", "both": "n"}
    assert [r.key[1] for r in plan.waiting] == ["Q"]


def test_less_than_a_path_does_not_start() -> None:
    assert not make_plan(
        [query("Q", 1, *NEEDS, paths=PATHS)], PODS, [], capacity(node("n", 1))
    ).nodes


def test_a_path_whose_source_fits_no_node_is_not_waited_for() -> None:
    """As a source that needs a device which died with its node."""
    nodes = capacity(node("n", 2), node("m", 2))
    plan = make_plan([query("Q", 1, *NEEDS, paths=PATHS)], PODS, [], nodes)
    assert set(plan.nodes) == {"left", "both"}


def test_only_the_query_whose_turn_is_next_starts_in_part() -> None:
    later = query("later", 1, *NEEDS, paths=PATHS)
    nodes = capacity(node("n", 4)).place(pod("runs"), "n")
    plan = make_plan([query("next", 90, "other"), later], PODS, [], nodes)
    assert [r.key[1] for r in plan.waiting] == ["next", "later"]
    assert not plan.nodes


def test_a_query_that_no_capacity_makes_whole_is_not_next() -> None:
    """It would hold for ever what the next query lacks."""
    pods = PODS | {"impossible": pod("impossible", 99)}
    never = query("never", 90, "other", "impossible", paths=[("other",)])
    waits = query("next", 1, *NEEDS, paths=PATHS)
    plan = make_plan([never, waits], pods, [], capacity(node("n", 4)))
    assert set(plan.nodes) <= set(NEEDS)
    assert plan.nodes


def test_parts_of_a_query_that_no_capacity_makes_whole_go_after_spare_replicas() -> None:
    pods = {"other": PODS["other"], "impossible": pod("impossible", 99)}
    never = query("never", 90, "other", "impossible", paths=[("other",)])
    spare = SpareReplica(pod("spare", 2, group="run", replica=1), priority=5)
    for cpu, expected in ((5, {"spare"}), (6, {"spare", "other"})):
        plan = make_plan([never], pods, [spare], capacity(node("n", cpu)))
        assert set(plan.nodes) == expected


def test_whole_queries_go_first() -> None:
    queries = [query("Q", 1, *NEEDS, paths=PATHS), query("whole", 1, "other")]
    plan = make_plan(queries, PODS, [], capacity(node("n", 4)))
    assert (started(plan), set(plan.nodes)) == (["whole"], {"other"})


def test_parts_go_before_spare_replicas() -> None:
    spare = SpareReplica(pod("spare", 2, group="run", replica=1), priority=5)
    waits = query("Q", 1, *NEEDS, paths=PATHS, capacity_reservation_is_over=True)
    assert set(make_plan([waits], PODS, [spare], capacity(node("n", 3))).nodes) == {"left", "both"}


_SIZES = st.dictionaries(st.sampled_from("pqrstu"), st.integers(1, 5), min_size=2, max_size=6)


@given(_SIZES, st.lists(st.integers(1, 8), min_size=1, max_size=3), st.data())
def test_parts_change_no_whole_query_and_are_whole_paths(
    sizes: dict[str, int], nodes: list[int], data: Any
) -> None:
    pods = {name: pod(name, cpu) for name, cpu in sizes.items()}
    subsets = st.sets(st.sampled_from(sorted(pods)), min_size=1)
    queries = []
    for number in range(data.draw(st.integers(1, 3))):
        paths = data.draw(st.lists(subsets, min_size=1, max_size=3))
        needs = set().union(*paths)
        queries.append(query(f"q{number}", data.draw(st.integers(0, 9)), *needs, paths=paths))
    pods = {key: found for key, found in pods.items() if any(key in d.needs for d in queries)}
    room = capacity(*(node(f"n{i}", cpu) for i, cpu in enumerate(nodes)))
    plan = make_plan(queries, pods, [], room)
    without = make_plan([replace(d, paths=()) for d in queries], pods, [], room)
    assert started(plan) == started(without)
    assert {r.key for r in plan.waiting} == {r.key for r in without.waiting}
    assert dict(without.nodes).items() <= dict(plan.nodes).items()
    for name, there in room.nodes.items():
        assert sum(sizes[key] for key, at in plan.nodes.items() if at == name) <= there.free.cpu_m
    early = set(plan.nodes) - set(without.nodes)
    waiting = [d for d in queries if d.key in {r.key for r in plan.waiting}]
    possible = [{p for p in d.paths if p <= set(plan.nodes)} for d in waiting]
    assert not early or any(early <= set().union(*paths) for paths in possible)


# --- a topology ---


def union_spec(max_delay: str) -> dict[str, Any]:
    """Two sources and their union, one task each."""
    spec = flights_spec()
    sources = [source | {"replicas": 1} for source in spec["sources"]]
    rows = " UNION ALL ".join(f"SELECT origin, time_hour FROM {s['name']}" for s in sources)
    both = {"name": "both", "inputs": [s["name"] for s in sources], "sql": rows}
    query = {"name": "q", "from": "both", "sink": spec["queries"][0]["sink"]}
    changed = {"sources": sources, "operators": [both], "queries": [query], "maxDelay": max_delay}
    return spec | changed


def with_two_of_three_nodes(
    cluster: ModelCluster, spec: dict[str, Any], checkpoint: int | None
) -> list[Any]:
    """The tasks that have a node after the loss of all three and the return of two."""
    cluster.add_topology("flights", spec)
    cluster.checkpoint_epoch = checkpoint
    for name in "abc":
        cluster.add_node(name, cpu_m=560, memory=1800 << 20)  # a task each, one a coordinator too
    cluster.settle()
    assert cluster.query_states() == {"q": "Live"}
    for name in "abc":
        cluster.kill_node_until_not_ready(name)
    cluster.pass_time(5.0)
    for name in "de":
        cluster.add_node(name, cpu_m=560, memory=1800 << 20)
        cluster.settle()
    return [p for p in cluster.tasks().values() if p.node in ("d", "e")]


@pytest.mark.parametrize(("when_missing", "starts"), [("EmitMatches", True), ("Block", False)])
def test_a_join_that_blocks_does_not_start_without_an_input(
    when_missing: str, starts: bool
) -> None:
    spec = joined_spec(when_missing)
    placed = with_two_of_three_nodes(ModelCluster(), spec, 40)
    assert len(placed) == (2 if starts else 0)


@pytest.mark.parametrize(("max_delay", "outdated"), [("2s", True), ("Infinite", False)])
def test_pods_of_a_join_are_outdated_by_another_way_to_wait(max_delay: str, outdated: bool) -> None:
    cluster = ModelCluster()
    cluster.add_topology("flights", joined_spec("EmitMatches", max_delay))
    for name in "abc":
        cluster.add_node(name, cpu_m=560, memory=1800 << 20)
    cluster.settle()
    cluster.edit("flights", **joined_spec("Block", max_delay))
    cluster.settle()
    text = "1 of 3 pods are outdated"
    assert (text in cluster.condition("Valid")["message"]) == outdated


def joined_spec(when_missing: str, max_delay: str = "2s") -> dict[str, Any]:
    spec = union_spec(max_delay)
    one, other = (source["name"] for source in spec["sources"])
    on, select = f"{one}.origin = {other}.origin", f"{one}.origin, {other}.time_hour"
    join = {"on": on, "within": "1h", "select": select, "whenMissing": when_missing}
    both = {"name": "both", "inputs": [one, other], "join": join}
    return spec | {"operators": [both]}


@pytest.mark.parametrize(
    ("max_delay", "checkpoint", "starts"),
    [("2s", 40, True), ("Infinite", 40, False), ("2s", None, False)],
)
def test_after_the_loss_of_all_nodes_a_query_starts_in_part(
    max_delay: str, checkpoint: int | None, starts: bool
) -> None:
    cluster = ModelCluster()
    placed = with_two_of_three_nodes(cluster, union_spec(max_delay), checkpoint)
    assert len(placed) == (2 if starts else 0)
    assert any("both" in p.name for p in placed) == starts
    if starts:
        tentative = {"outputState": "UP_FAILURE", "missingInputs": ["weather"]}
        cluster.task_reports = {p.name: tentative for p in placed if "both" in p.name}
        cluster.pass_time(1.0)
        cluster.settle()
        assert cluster.query_states() == {"q": "Tentative"}
    cluster.task_reports = {}
    cluster.add_node("f", cpu_m=560, memory=1800 << 20)
    cluster.settle()
    assert cluster.query_states() == {"q": "Live"}
