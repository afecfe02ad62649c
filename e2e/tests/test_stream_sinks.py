"""A stream sink in a cluster: `rekindle tail` goes on while the replica it reads is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_types import every_cluster_type_kubelet_marked_long, storms_topology
from tail_process import Tail, expected_rows

from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.oracle import run_reference
from rekindle_testing.harness.run import TopologyRun

pytestmark = [pytest.mark.spark, pytest.mark.failures, pytest.mark.timeout(900)]

EPOCHS = 15


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def streamed(name: str) -> dict[str, Any]:
    document = storms_topology(name)
    (query,) = document["spec"]["queries"]
    query["sink"] = {"stream": {"retain": "8Mi"}}
    return document


@every_cluster_type_kubelet_marked_long
def test_a_reader_gets_each_row_once_while_its_replica_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    document = streamed("streamed")
    (query,) = document["spec"]["queries"]
    run_reference(document, cluster.shared, tmp_path / "reference")
    with TopologyRun(cluster, document) as run:
        run.wait_live()
        tail = Tail(cluster, run.name, query["name"])
        try:
            tail.wait(EPOCHS)
            run.kill_pod_processes(run.task_pods(query["from"])[0])
            tail.wait(tail.newest + EPOCHS)
            run.wait_redundant()
            tail.wait(tail.newest + EPOCHS)
        finally:
            errors = tail.end()
        through = tail.newest - 1
        rows = tail.rows(through)
        print(f"{sum(map(len, rows.values()))} rows through epoch {through}; {errors}")
        assert rows == expected_rows(tmp_path / "reference" / query["name"], through)
        assert "trying again" in errors
