"""A killed task without a replica continues in a standby; its sink is what the reference says."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cluster_types import every_cluster_type_kubelet_marked_long, storms_topology

from rekindle import names
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [
    every_cluster_type_kubelet_marked_long,
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.long,  # of the operator alone: test_operator_standbys.py
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def test_killed_tasks_continue_in_standbys(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = _topology()
    with TopologyRun(cluster, document) as run:
        run.wait_live(timeout_s=300)
        for lose in (run.kill_pod_processes, run.delete_pod):
            (standby,) = _wait_for_standby(run)
            (pod,) = run.task_pods("storms")
            began = time.monotonic()
            lose(pod)
            _wait_until_it_is_the_task(run, standby)
            run.wait_sinks_advance(timeout_s=240)
            print(f"{lose.__name__}: {time.monotonic() - began:.1f} s")
        reference = Reference(document, cluster.shared, tmp_path_factory.mktemp("oracle"))
        reference.execute()
        assert run.verify(reference) > 0


def _wait_for_standby(run: TopologyRun) -> list[str]:
    """Until it is warm; its name."""

    def is_warm() -> bool:
        status = run.observer.status
        return status.get("phase") == "Running" and status.get("standby") == "1/1"

    wait_for("a warm standby", is_warm, 240, every_s=0.25)
    labels = f"{names.LABEL_TOPOLOGY}={run.name},{names.LABEL_ROLE}={names.ROLE_STANDBY}"
    return [pod.metadata.name for pod in run.cluster.pods(labels)]


def _wait_until_it_is_the_task(run: TopologyRun, standby: str) -> None:
    def is_the_task() -> bool:
        return [pod.metadata.name for pod in run.task_pods("storms")] == [standby]

    wait_for(f"{standby} is the task", is_the_task, 120)


def _topology() -> dict[str, Any]:
    document = storms_topology("standbys")
    spec = document["spec"]
    spec["operators"][0]["replicas"] = 1
    spec["recovery"] = {"standby": 1}
    return document
