"""The pod of a task has the memory that it may use in a variable."""

from __future__ import annotations

from typing import Any

import pytest
from model_cluster import ModelCluster

LIMIT = {"limits": {"memory": "3Gi"}}


def memory_of_tasks(cluster: ModelCluster) -> set[str]:
    cluster.add_node("a", cpu_m=64_000, memory=64 << 30)
    cluster.settle()
    return {variable(cluster.raw_pods[pod.name]) for pod in cluster.tasks().values()}


def variable(pod: dict[str, Any]) -> str:
    (task,) = (c for c in pod["spec"]["containers"] if c["name"] == "task")
    value: str = next(e["value"] for e in task["env"] if e["name"] == "REKINDLE_MEMORY")
    return value


def test_the_request_is_used_without_a_limit(cluster: ModelCluster) -> None:
    assert memory_of_tasks(cluster) == {str(1 << 30)}


def test_a_task_gets_the_memory_limit_of_the_topology(cluster: ModelCluster) -> None:
    cluster.edit("flights", resources=LIMIT)
    assert memory_of_tasks(cluster) == {str(3 << 30)}


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"containers": [{"name": "task", "resources": LIMIT}]}},
        {"spec": {"resources": LIMIT}},
    ],
)
def test_a_task_gets_the_memory_limit_of_the_pod_template(
    cluster: ModelCluster, template: dict[str, Any]
) -> None:
    cluster.edit("flights", podTemplate=template)
    assert memory_of_tasks(cluster) == {str(3 << 30)}
