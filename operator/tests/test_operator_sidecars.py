"""A container that fails beside a task is reported, and replaces no task; partners stay."""

from __future__ import annotations

from typing import Any

import pytest
from flights_example import with_replicas
from model_cluster import ModelCluster

from rekindle_operator.cluster.containers import container_error, is_creating_containers
from rekindle_operator.cluster.convert import rfc3339

RUNNING: dict[str, Any] = {"name": "task", "ready": True, "state": {"running": {}}}
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}
KILLED = {"reason": "OOMKilled", "exitCode": 137}


def crashed(restarts: int, now: float, name: str = "agent") -> dict[str, Any]:
    ended = {"exitCode": 7, "reason": "Error", "finishedAt": rfc3339(now)}
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    common = {"name": name, "ready": False, "restartCount": restarts}
    return {**common, "state": back_off, "lastState": {"terminated": ended}}


def set_containers(cluster: ModelCluster, pod: str, *statuses: dict[str, Any]) -> None:
    """The pod as a whole is Ready if all of them are."""
    ready = "True" if all(c["ready"] for c in statuses) else "False"
    conditions = [{"type": "Ready", "status": ready}]
    changed = {"containerStatuses": list(statuses), "conditions": conditions}
    cluster.raw_pods[pod]["status"] |= changed


def run_for(cluster: ModelCluster, seconds: float) -> None:
    end = cluster.now + seconds
    while cluster.now < end:
        cluster.pass_time(5.0)
        cluster.settle()


def crash_sidecars(cluster: ModelCluster) -> None:
    for pod in cluster.tasks():
        set_containers(cluster, pod, RUNNING, crashed(5, cluster.now))
    cluster.settle()


def test_a_crashing_sidecar_replaces_no_task(running: ModelCluster) -> None:
    before = set(running.tasks())
    crash_sidecars(running)
    run_for(running, 400.0)
    assert set(running.tasks()) == before
    assert running.status()["phase"] == "Running"


def test_a_crashing_sidecar_is_reported(running: ModelCluster) -> None:
    crash_sidecars(running)
    valid = running.condition("Valid")
    text = "container agent of flown/0/0 fails: Error, exit code 7, 5 restarts (and of 7 more pods)"
    assert valid["status"] == "True"
    assert text in valid["message"]
    assert [e.note for e in running.events if e.reason == "SidecarFailing"] == [text]


def test_a_sidecar_that_runs_again_is_reported_for_a_while(running: ModelCluster) -> None:
    crash_sidecars(running)
    for pod in running.tasks():
        again = crashed(5, running.now) | {"ready": True, "state": {"running": {}}}
        set_containers(running, pod, RUNNING, again)
    run_for(running, 60.0)
    assert "container agent" in running.condition("Valid")["message"]
    run_for(running, 600.0)
    assert "container agent" not in running.condition("Valid")["message"]
    assert running.event_reasons().count("SidecarFailing") == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({"containerStatuses": [RUNNING, crashed(3, 0.0)]}, ""),
        ({"containerStatuses": [RUNNING], "initContainerStatuses": [crashed(3, 0.0)]}, ""),
        (
            {
                "containerStatuses": [{"name": "task", "state": {"waiting": {}}}],
                "initContainerStatuses": [crashed(3, 0.0, "fetch")],
            },
            "container fetch: CrashLoopBackOff: back-off (last: Error, exit code 7, 3 restarts)",
        ),
        (
            {"containerStatuses": [crashed(3, 0.0), {"name": "task", "state": PULL}]},
            "container task: ImagePullBackOff: manifest unknown",
        ),
    ],
)
def test_the_error_of_a_pod_is_that_of_its_task(status: dict[str, Any], error: str) -> None:
    assert container_error(status, "task") == error


def test_a_task_beside_a_container_without_image_has_started() -> None:
    """The pod is Pending until each container was created."""
    waits = {"name": "agent", "ready": False, "state": PULL}
    status = {"phase": "Pending", "containerStatuses": [RUNNING, waits]}
    assert not is_creating_containers({"nodeName": "a"}, status, "task")


def test_a_task_is_ready_beside_a_container_that_is_not(running: ModelCluster) -> None:
    crash_sidecars(running)
    assert all(p.ready for p in running.tasks().values())


def test_partners_whose_tasks_crash_are_not_deleted_together(cluster: ModelCluster) -> None:
    """The state of their partition may be in these two pods alone."""
    for name in "abcdef":
        cluster.add_node(name)
    cluster.settle()
    alarms = {p for p in cluster.tasks() if p.startswith("flights-alarms-0-")}
    assert len(alarms) == 2
    cluster.stuck |= alarms
    for pod in alarms:
        failed = crashed(5, cluster.now, "task")
        cluster.raw_pods[pod]["status"] |= {"containerStatuses": [failed]}
    successor = f"{min(alarms)[:-1]}2"
    cluster.stuck.add(successor)  # it does not become live yet
    run_for(cluster, 120.0)
    assert alarms & set(cluster.tasks()) == {max(alarms)}
    cluster.stuck.discard(successor)
    cluster.settle()
    assert not alarms & set(cluster.tasks())


def test_a_single_replica_that_crashes_is_replaced(cluster: ModelCluster) -> None:
    cluster.edit("flights", **with_replicas(1))
    for name in "ab":
        cluster.add_node(name)
    cluster.settle()
    (victim,) = (p for p in cluster.tasks() if p.startswith("flights-alarms-0-"))
    cluster.stuck.add(victim)
    cluster.raw_pods[victim]["status"] |= {
        "containerStatuses": [crashed(5, cluster.now, "task")],
    }
    run_for(cluster, 70.0)
    assert victim not in cluster.tasks()
    assert cluster.status()["phase"] == "Running"


@pytest.mark.parametrize("refused", [True, False])
def test_a_partner_without_a_node_keeps_no_replica_that_crashes(
    cluster: ModelCluster, refused: bool
) -> None:
    """A full quota refuses it, or there is no capacity: it has no state, and may wait for ever."""
    for name in "abcd":
        cluster.add_node(name)
    cluster.settle()
    first, second = (f"flights-alarms-0-{replica}-1" for replica in (0, 1))
    if refused:
        cluster.quota = 0
    else:
        cluster.unbound_segments = {"alarms"}
    lost = cluster.tasks()[first].node
    assert lost is not None
    cluster.kill_node_until_not_ready(lost)
    run_for(cluster, 30.0)
    cluster.stuck.add(second)
    cluster.raw_pods[second]["status"] |= {"containerStatuses": [crashed(5, cluster.now, "task")]}
    run_for(cluster, 100.0)
    assert second not in cluster.tasks()
