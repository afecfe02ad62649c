"""Moves to emptier nodes: three of five nodes are lost, and the tasks are packed on the other two.
When nodes are back, they spread out again while the topology runs.

On process nodes alone: where tasks are is asserted, which depends on the size of the nodes. Not in
`make test`: two moves take minutes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cluster_types import flights_cluster, storms_topology

from rekindle_testing.harness.nodes import ProcessNodes
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.long,
    pytest.mark.timeout(3000),
]

_SPEEDUP = 28_800  # eight hours of weather an epoch: the input lasts 18 minutes


def test_tasks_spread_out_when_nodes_are_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("process")
    with flights_cluster(directory, ProcessNodes(), nodes=5) as cluster:
        with TopologyRun(cluster, _topology()) as run:
            run.wait_live(timeout_s=600)
            run.wait_checkpoint(timeout_s=240)
            victims = sorted(cluster.nodes)[:3]
            cluster.kill_nodes(victims)
            run.observer.add_event("lost", ", ".join(victims))
            run.wait_sinks_advance(timeout_s=600)
            run.wait_redundant(timeout_s=600)
            assert _tasks_by_node(run) == [2, 2]
            for _ in victims:
                cluster.add_node()
            _wait_spread(run)
        # Not beside the topology, which would have to share its cores with it.
        reference = Reference(_topology(), cluster.shared, tmp_path_factory.mktemp("oracle"))
        reference.execute()
        assert run.verify(reference) > 0


def _wait_spread(run: TopologyRun) -> None:
    """Two moves: one at least a minute after the recovery, the other as long after the first."""
    began_s = run.observer.now()
    wait_for("one task a node", lambda: _tasks_by_node(run) == [1, 1, 1, 1], 900, 1)
    run.wait_redundant(timeout_s=240)
    run.wait_sinks_advance(timeout_s=240)
    took_s = run.observer.now() - began_s
    pause_s = run.longest_pause_s("storm-watch", took_s)
    print(f"spread in {took_s:.0f} s; the longest time between two epochs: {pause_s:.1f} s")
    left = [c for c in run.observer.history.changes if c.at_s >= began_s]
    assert not left, f"a query left Live: {left}"


def _topology() -> dict[str, Any]:
    """Four tasks, of which two fit on a node."""
    document = storms_topology("rebalanced")
    spec = document["spec"]
    spec["recovery"] = {"rebalance": True}
    (source,), (operator,) = spec["sources"], spec["operators"]
    source["replicas"] = 2
    source["files"]["speedup"] = _SPEEDUP
    operator |= {"keyBy": ["origin"], "partitions": 2, "replicas": 1}
    return document


def _tasks_by_node(run: TopologyRun) -> list[int]:
    tasks = run.cluster.tasks(run.name)
    return sorted(Counter(p.spec.node_name for p in tasks if p.spec.node_name).values())
