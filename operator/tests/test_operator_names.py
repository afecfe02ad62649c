"""Names of created objects are unique in a namespace."""

from __future__ import annotations

import re
from typing import Any

from flights_example import flights_spec
from hypothesis import example, given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle.names import MAX_NAME_CHARS, coordinator_pod_name, task_pod_name
from rekindle.topology.checks.fields import NAME_IN_SPEC, TOPOLOGY_NAME

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_TOPOLOGIES = st.one_of(
    st.from_regex(r"[a-c](-{0,2}[a-c1]){0,4}", fullmatch=True),
    st.from_regex(TOPOLOGY_NAME, fullmatch=True),
)
_SEGMENTS = st.one_of(
    st.from_regex(r"[a-c]([_-]{0,2}[a-c1]){0,4}", fullmatch=True),
    st.from_regex(NAME_IN_SPEC, fullmatch=True),
)
_TASKS = st.tuples(
    _TOPOLOGIES, _SEGMENTS, st.integers(0, 11), st.integers(0, 2), st.integers(1, 11)
)


def _name(task: tuple[str, str, int, int, int]) -> str:
    topology, segment, partition, replica, incarnation = task
    return task_pod_name(topology, segment, partition, replica, incarnation)


@given(one=_TASKS, other=_TASKS)
@example(one=("a", "b-c", 0, 0, 1), other=("a-b", "c", 0, 0, 1))
@example(one=("a", "b-c", 0, 0, 1), other=("a--b", "c", 0, 0, 1))
@example(one=("a", "b_c-d", 0, 0, 1), other=("a-b", "c-d", 0, 0, 1))
def test_pods_of_two_tasks_have_two_names(
    one: tuple[str, str, int, int, int], other: tuple[str, str, int, int, int]
) -> None:
    """`_` and `-` are the same in a name; no topology has both of two such names."""
    same = all(
        str(a).replace("_", "-") == str(b).replace("_", "-")
        for a, b in zip(one, other, strict=True)
    )
    assert (_name(one) == _name(other)) == same


@given(task=_TASKS, coordinated=_TOPOLOGIES, incarnation=st.integers(1, 11))
def test_a_tasks_name_is_a_label_and_not_a_coordinators(
    task: tuple[str, str, int, int, int], coordinated: str, incarnation: int
) -> None:
    name = _name(task)
    assert len(name) <= MAX_NAME_CHARS
    assert _LABEL.fullmatch(name)
    assert name != coordinator_pod_name(coordinated, incarnation)


def test_a_pods_name_contains_simple_names_unchanged() -> None:
    assert task_pod_name("my-flights", "storms", 2, 1, 3) == "my-flights-storms-2-1-3"


def _with_storms_called(name: str) -> dict[str, Any]:
    spec = flights_spec()
    for node in spec["operators"]:
        node["name"] = name if node["name"] == "storms" else node["name"]
    for query in spec["queries"]:
        query["from"] = name if query["from"] == "storms" else query["from"]
    return spec


def test_topologies_with_a_common_prefix_both_run() -> None:
    cluster = ModelCluster()
    for node in "abc":
        cluster.add_node(node)
    cluster.add_topology("flights", _with_storms_called("old-storms"))
    cluster.settle()
    cluster.add_topology("flights-old", flights_spec())
    cluster.settle()
    phases = {name: cluster.status(name)["phase"] for name in cluster.topologies}
    assert phases == {"flights": "Running", "flights-old": "Running"}
