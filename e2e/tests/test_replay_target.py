"""`checkpoint.replayTarget` on a cluster: checkpoints are left out, and a killed task replays."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_types import every_cluster_type_kubelet_marked_long, storms_topology

from rekindle.report import read_report
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [
    every_cluster_type_kubelet_marked_long,
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.long,  # of the coordinator alone: test_coordinator_policy.py
    pytest.mark.timeout(900),
]

INTERVAL_EPOCHS = 5
TARGET_S = 20


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def test_killed_tasks_replay_what_the_target_allows(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = _topology()
    with TopologyRun(cluster, document) as run:
        run.wait_live(timeout_s=300)
        _wait_left_out(run)
        for _ in range(2):
            run.kill_pod_processes(run.task_pods("storms")[0])
            wait_for("the loss is seen", lambda: not run.observer.all_live(), 120)
            run.wait_sinks_advance(timeout_s=240)
            _wait_left_out(run)
            assert run.observer.condition_status("Checkpointed") == "True"
        reference = Reference(document, cluster.shared, tmp_path_factory.mktemp("oracle"))
        reference.execute()
        assert run.verify(reference) > 0


def _wait_left_out(run: TopologyRun) -> None:
    """Until a checkpoint is newer than now, and some checkpoint epochs after it are left out."""
    run.wait_checkpoint(after=run.observer.checkpoint_epoch(), timeout_s=120)

    def is_left_out() -> bool:
        report = read_report(run.observer.status["dataPlane"])
        checkpoint, head = report.checkpoint, report.head_epoch
        if checkpoint is None or checkpoint.next_epoch is None or head is None:
            return False
        replays = [task.replay_s for task in report.tasks.values() if task.replay_s is not None]
        print(f"checkpoint {checkpoint.epoch}, next {checkpoint.next_epoch}, replays {replays} s")
        left_out = head - checkpoint.epoch > 2 * INTERVAL_EPOCHS
        return left_out and bool(replays) and max(replays) <= TARGET_S

    wait_for("left out checkpoint epochs", is_left_out, 120, every_s=0.5)


def _topology() -> dict[str, Any]:
    document = storms_topology("replay-target")
    spec = document["spec"]
    spec["operators"][0]["replicas"] = 1
    spec["checkpoint"] |= {"interval": f"{INTERVAL_EPOCHS}s", "replayTarget": f"{TARGET_S}s"}
    return document
