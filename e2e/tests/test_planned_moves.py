"""Planned moves: `kubectl drain` of every node in turn, while the topology runs.

The topology has a source of one replica, for which no other stands in while it moves, and an
operator of two. The coordinator and the replicas of Rekindle's operator move as well.
"""

from __future__ import annotations

from typing import Any

import pytest
from cluster_types import every_cluster_type, storms_topology

from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun

pytestmark = [
    every_cluster_type,
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.timeout(1500),
]

_SPEEDUP = 28_800  # eight hours of weather an epoch: the input lasts 18 minutes
_DRAIN_S = 240


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def test_draining_every_node_in_turn_stops_no_query(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with TopologyRun(cluster, _topology()) as run:
        run.wait_live()
        run.wait_redundant()
        run.wait_checkpoint()
        began_s = run.observer.now()
        for node in sorted(cluster.nodes):
            _drain(run, node)
            run.wait_sinks_advance()
            run.wait_redundant()
            cluster.kubectl("uncordon", node)
        print(f"all nodes were drained in {run.observer.now() - began_s:.0f} s")
        pause_s = run.longest_pause_s("storm-watch", run.observer.now() - began_s)
        print(f"the longest time between two epochs of the sink: {pause_s:.1f} s")
        left = [c for c in run.observer.history.changes if c.at_s >= began_s]
        assert not left, f"a query left Live: {left}"
    # Not beside the topology, which would have to share its cores with it.
    reference = Reference(_topology(), cluster.shared, tmp_path_factory.mktemp("oracle"))
    reference.execute()
    assert run.verify(reference) > 0


def _topology() -> dict[str, Any]:
    document = storms_topology("drained")
    for source in document["spec"]["sources"]:
        source["files"]["speedup"] = _SPEEDUP
    return document


def _drain(run: TopologyRun, node: str) -> None:
    """As an administrator does it: kubectl waits for as long as pods may not be evicted."""
    # It loses nothing; "lost", since `verify` requires such events before the end of input.
    at_s = run.observer.add_event("lost", f"{node} is drained")
    held = _pods_on(run, node)
    timeout = f"--timeout={_DRAIN_S}s"
    options = ("--ignore-daemonsets", "--delete-emptydir-data", timeout)
    run.cluster.kubectl("drain", node, *options, timeout_s=_DRAIN_S + 10)
    assert not _pods_on(run, node)
    print(f"{node}: drained of {held} in {run.observer.now() - at_s:.0f} s")


def _pods_on(run: TopologyRun, node: str) -> list[str]:
    pods = [*run.cluster.tasks(run.name), *run.coordinator_pods()]
    return sorted(p.metadata.name for p in pods if p.spec.node_name == node)
