"""What pods request, counted as the scheduler counts, and packed by every resource."""

from __future__ import annotations

from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.convert import pod_requests

GPU = "nvidia.com/gpu"


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def sidecar(cpu: str) -> dict[str, Any]:
    return container(cpu, restartPolicy="Always")


@pytest.mark.parametrize(
    ("init_containers", "cpu_m"),
    [
        ([], 500),
        ([container("2")], 2000),
        ([sidecar("1")], 1500),
        ([sidecar("1"), container("2")], 3000),
        ([container("2"), sidecar("1")], 2000),
        ([sidecar("300m"), sidecar("300m"), container("1")], 1600),
    ],
)
def test_sidecars_count_beside_later_init_containers(init_containers: Any, cpu_m: int) -> None:
    """KEP-753: each init container runs beside the sidecars before it."""
    spec = {"containers": [container("500m")], "initContainers": init_containers}
    assert pod_requests(spec).cpu_m == cpu_m


def test_pod_level_requests_replace_the_sum_of_containers() -> None:
    spec = {"resources": {"requests": {"cpu": "4"}}, "containers": [container("500m")]}
    assert pod_requests(spec).cpu_m == 4000


@pytest.mark.parametrize(("containers", "cpu_m"), [([{}], 4000), ([container("500m")], 500)])
def test_a_pod_level_limit_is_a_request_if_containers_have_none(
    containers: Any, cpu_m: int
) -> None:
    spec = {"resources": {"limits": {"cpu": "4"}}, "containers": containers}
    assert pod_requests(spec).cpu_m == cpu_m


def test_devices_disk_and_overhead_are_requests_too() -> None:
    resources = {"limits": {GPU: 1}, "requests": {"ephemeral-storage": "1Ki", "cpu": 1}}
    spec = {"containers": [{"resources": resources}], "overhead": {"memory": "2Ki", "cpu": "1m"}}
    others = (("ephemeral-storage", 1024), (GPU, 1))
    assert pod_requests(spec) == ResourceAmounts(1001, 2048, 1, others)


@pytest.mark.parametrize(
    ("node", "covered"),
    [({GPU: "1"}, True), ({GPU: "0"}, False), ({}, False), ({"amd.com/gpu": "1"}, False)],
)
def test_a_node_without_the_device_does_not_cover_it(node: Any, covered: bool) -> None:
    assert ResourceAmounts.parse(node).covers(ResourceAmounts.parse({GPU: 1}, pods=0)) is covered


def test_used_devices_are_subtracted() -> None:
    free = ResourceAmounts.parse({GPU: 2}) - ResourceAmounts.parse({GPU: 1}, pods=0)
    assert free.covers(ResourceAmounts.parse({GPU: 1}, pods=0))
    assert not free.covers(ResourceAmounts.parse({GPU: 2}, pods=0))


def test_tasks_that_request_a_gpu_are_planned_on_gpu_nodes_only() -> None:
    cluster = ModelCluster()
    resources = {"limits": {GPU: "1"}}
    template = {"spec": {"containers": [{"name": "task", "resources": resources}]}}
    cluster.add_topology("flights", flights_spec() | {"podTemplate": template})
    for name in ("a-cpu", "b-cpu"):
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
    for name in ("g-gpu", "h-gpu"):
        cluster.add_node(name, cpu_m=8000, memory=32 << 30, others=((GPU, 4),))
    cluster.settle()
    assert {p.node for p in cluster.tasks().values()} == {"g-gpu", "h-gpu"}
    assert cluster.status()["phase"] == "Running"


def test_tasks_without_a_gpu_leave_gpu_nodes_free() -> None:
    cluster = ModelCluster()
    cluster.add_topology("flights", flights_spec())
    cluster.add_node("g", cpu_m=64000, memory=512 << 30, others=((GPU, 8),))
    for name in ("a", "b"):
        cluster.add_node(name, cpu_m=8000, memory=32 << 30)
    cluster.settle()
    assert {p.node for p in cluster.tasks().values()} == {"a", "b"}
