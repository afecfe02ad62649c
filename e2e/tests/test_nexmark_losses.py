"""Joins and sessions lose three nodes: the sinks get what a run without failures writes.

Queries of Nexmark, with two partitions and two replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster_types import every_cluster_type_kubelet_marked_long

from rekindle_testing.harness import nexmark
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.long,  # of joins without a cluster: test_simulation_operators.py
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    nexmark.prepare_input(shared_cluster.shared / "input")
    shared_cluster.upload("input")
    return shared_cluster


@every_cluster_type_kubelet_marked_long
@pytest.mark.parametrize(
    ("queries", "segment"),
    [
        (("q20", "q11"), "q20"),  # an inner join, and sessions
        (("q5",), "counts"),  # windows, joined by their ends
        (("q8",), "q8"),
        (("q3",), "q3"),
    ],
    ids=["q20 and q11", "q5", "q8", "q3"],
)
def test_three_lost_nodes_lose_no_rows(
    cluster: Cluster, queries: Sequence[str], segment: str, tmp_path: Path
) -> None:
    resource = nexmark.topology_resource(f"nexmark-{queries[0]}", queries)
    reference = Reference(resource, cluster.shared, tmp_path)
    reference.execute()
    with TopologyRun(cluster, resource) as run:
        run.wait_live()
        run.wait_checkpoint()
        for count in (1, 2):
            _lose(run, _nodes(run, segment, count))
        run.wait_redundant()
        run.verify(reference)


def _nodes(run: TopologyRun, segment: str, count: int) -> list[str]:
    """So many that live and have its tasks. A lost node still has its pods for a while."""

    def found() -> list[str] | None:
        nodes = {pod.spec.node_name for pod in run.task_pods(segment)} & set(run.cluster.nodes)
        return sorted(nodes)[:count] if len(nodes) >= count else None

    return wait_for(f"{count} nodes with tasks of {segment}", found, 180)


def _lose(run: TopologyRun, victims: list[str]) -> None:
    run.cluster.kill_nodes(victims)
    run.observer.add_event("lost", ", ".join(victims))
    for _ in victims:
        run.cluster.add_node()
    run.wait_sinks_advance(timeout_s=180)
