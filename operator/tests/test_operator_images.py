"""The image is part of a generation: an upgrade of the operator changes no task silently."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.cluster.amounts import total
from rekindle_operator.cluster.convert import topology_view
from rekindle_operator.cluster.model import PodView, Taint
from rekindle_operator.reconcile.actions import Action, DeletePod
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.settings import PodDefaults

NEW = "rekindle/pipelines:0.2.0"
OLD = PodDefaults().image


def upgrade(cluster: ModelCluster) -> None:
    """As `helm upgrade` with another image of tasks."""
    cluster.settings = replace(cluster.settings, pods=replace(cluster.settings.pods, image=NEW))


def images(cluster: ModelCluster, role: str) -> dict[str, Any]:
    return {
        name: raw["spec"]["containers"][0]["image"]
        for name, raw in cluster.raw_pods.items()
        if raw["metadata"]["labels"].get(names.LABEL_ROLE) == role
    }


def test_a_record_has_the_image_that_was_the_default(running: ModelCluster) -> None:
    (record,) = running.generation_records.values()
    assert json.loads(record["data"]["topology.json"])["image"] == OLD


def test_replacements_after_an_upgrade_run_the_recorded_image(running: ModelCluster) -> None:
    before = set(running.tasks())
    upgrade(running)
    running.kill_node_until_not_ready("a")
    running.settle()
    assert set(running.tasks()) != before
    assert set(images(running, "task").values()) == {OLD}
    assert set(images(running, "coordinator").values()) == {OLD}


def test_an_outdated_image_is_reported(running: ModelCluster) -> None:
    assert NEW not in running.condition("Valid")["message"]
    upgrade(running)
    running.settle()
    valid = running.condition("Valid")
    assert valid["status"] == "True"
    assert OLD in valid["message"]
    assert NEW in valid["message"]
    assert running.event_reasons().count("ImageOutdated") == 1


def test_the_next_generation_takes_the_new_image(running: ModelCluster) -> None:
    upgrade(running)
    running.settle()
    running.edit("flights", queries=[{**q, "priority": 7} for q in flights_spec()["queries"]])
    running.settle()
    assert NEW not in running.condition("Valid")["message"]
    running.kill_node_until_not_ready("a")
    running.settle()
    assert NEW in images(running, "task").values()


def test_an_image_of_the_spec_is_not_outdated(running: ModelCluster) -> None:
    running.edit("flights", image="mine:1")
    running.settle()
    upgrade(running)
    running.settle()
    assert "keeps image" not in running.condition("Valid")["message"]


def request_roll(cluster: ModelCluster) -> None:
    view = cluster.topologies["flights"]
    cluster.topologies["flights"] = replace(view, version=cluster.next_version(), roll=True)


def test_running_pods_stay_after_an_edit_of_the_image(running: ModelCluster) -> None:
    before = set(running.tasks())
    running.edit("flights", image=NEW)
    running.settle()
    assert set(running.tasks()) == before


def settle_pod_by_pod(cluster: ModelCluster) -> list[Action]:
    """What was done. A roll takes more passes than `settle` allows for."""
    done: list[Action] = []
    for _ in range(200):
        actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        done += actions
        cluster.apply(actions)
        if not cluster.kubelets_and_scheduler() and not actions:
            return done
    raise AssertionError("the roll does not end")


def test_a_roll_replaces_all_pods_and_is_no_recovery(running: ModelCluster) -> None:
    running.edit("flights", image=NEW)
    request_roll(running)
    settle_pod_by_pod(running)
    assert set(images(running, "task").values()) == {NEW}
    assert set(images(running, "coordinator").values()) == {NEW}
    assert running.status()["phase"] == "Running"
    assert "recovery" not in running.status()
    incarnations = {p.incarnation for p in running.tasks().values()}
    assert incarnations == {2}, "each was replaced once"


@pytest.mark.parametrize("change", ["digest", "sidecar"])
def test_an_image_that_admission_changes_is_not_outdated(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Webhooks replace tags by digests and registries by mirrors, and put sidecars first."""
    create = ModelCluster.create_pod

    def admit(cluster: ModelCluster, manifest: dict[str, Any]) -> None:
        containers = manifest["spec"]["containers"]
        if change == "digest":
            containers[0]["image"] += "@sha256:0123"
        else:
            containers.insert(0, {"name": "proxy", "image": "proxy:1"})
        create(cluster, manifest)

    monkeypatch.setattr(ModelCluster, "create_pod", admit)
    cluster = ModelCluster()
    cluster.add_topology("flights", flights_spec())
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    request_roll(cluster)
    cluster.settle()
    assert cluster.coordinator().incarnation == 1
    cluster.edit("flights", image=NEW)
    settle_pod_by_pod(cluster)
    assert cluster.coordinator().incarnation == 2
    assert {p.incarnation for p in cluster.tasks().values()} == {2}


def test_a_pod_that_a_roll_deletes_is_no_loss(running: ModelCluster) -> None:
    """Its replacement says so, whatever the pod itself had replaced before."""
    running.kill_node_until_not_ready("a")
    running.settle()
    assert any(p.predecessor_lost_at is not None for p in running.tasks().values())
    running.edit("flights", image=NEW)
    request_roll(running)
    done = settle_pod_by_pod(running)
    deleted = [a.why for a in done if isinstance(a, DeletePod) and "coordinator" not in a.name]
    assert set(deleted) == {"a roll replaces it"}
    assert {p.predecessor_lost_at for p in running.tasks().values()} == {None}


def test_a_roll_takes_one_replica_at_a_time(running: ModelCluster) -> None:
    running.edit("flights", image=NEW)
    request_roll(running)
    running.stuck.update(f"{name[:-1]}2" for name in running.tasks())
    running.settle()
    new = [name for name, image in images(running, "task").items() if image == NEW]
    assert len(new) == 1, "the next one waits until it is live"


def test_a_roll_takes_no_task_before_the_new_coordinator_reports(running: ModelCluster) -> None:
    running.edit("flights", image=NEW)
    request_roll(running)
    before = set(running.tasks())
    running.reports_lost = True  # the old one's report is still fresh, and all tasks are live
    running.settle()
    assert NEW in images(running, "coordinator").values()
    assert set(running.tasks()) == before
    running.reports_lost = False
    settle_pod_by_pod(running)
    assert set(images(running, "task").values()) == {NEW}


def leave_unstarted(monkeypatch: pytest.MonkeyPatch, cluster: ModelCluster) -> set[str]:
    """Coordinators get a node and do not start if their image is in the returned set, to which the
    test adds images."""
    held: set[str] = set()
    bind = cluster._bind

    def bind_only(raw: dict[str, Any], pod: PodView) -> bool:
        leases = dict(cluster.leases)
        bound = bind(raw, pod)
        if bound and pod.role == names.ROLE_COORDINATOR and pod.image in held:
            cluster.leases = leases
            waiting = {"reason": "ImagePullBackOff", "message": "not found"}
            status = {"name": "coordinator", "state": {"waiting": waiting}}
            raw["status"] = {"phase": "Pending", "containerStatuses": [status]}
        return bound

    monkeypatch.setattr(cluster, "_bind", bind_only)
    return held


def pass_seconds(cluster: ModelCluster, seconds: int, step_s: int = 1) -> None:
    for _ in range(seconds // step_s):
        cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
        cluster.kubelets_and_scheduler()
        cluster.pass_time(step_s)


def test_the_old_coordinator_works_until_the_new_one_has_started(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = leave_unstarted(monkeypatch, running)
    held.add(NEW)
    before = set(running.tasks())
    running.edit("flights", image=NEW)
    request_roll(running)
    pass_seconds(running, 200, step_s=4)
    assert running.coordinator().incarnation > 2, "others were tried on other nodes"
    assert len(images(running, "coordinator")) == 2
    assert "flights-coordinator-1" in images(running, "coordinator")
    assert running.status()["phase"] == "Running"
    assert set(running.tasks()) == before
    running.edit("flights", image=OLD)
    pass_seconds(running, 10)
    assert set(images(running, "coordinator").values()) == {OLD}
    assert len(images(running, "coordinator")) == 1


def test_a_new_coordinator_gets_the_place_of_the_old_one(running: ModelCluster) -> None:
    """If no node has room for both."""
    for name, node in running.nodes.items():
        used = total(p.requests for p in running.pods_on(name))
        running.nodes[name] = replace(node, allocatable=used, version=running.next_version())
    running.edit("flights", image=NEW)
    request_roll(running)
    pass_seconds(running, 20)
    assert set(images(running, "coordinator").values()) == {NEW}


def test_the_old_coordinator_works_while_no_node_takes_the_new_one(running: ModelCluster) -> None:
    """Its own node would not take it either."""
    taints = (Taint("maintenance", "", "NoSchedule"),)
    for name, node in running.nodes.items():
        running.nodes[name] = replace(node, taints=taints, version=running.next_version())
    running.binding = False
    running.edit("flights", image=NEW)
    request_roll(running)
    pass_seconds(running, 60)
    assert "flights-coordinator-1" in images(running, "coordinator")
    assert running.status()["phase"] == "Running"
    waits = "the roll waits for a new coordinator (taint maintenance:NoSchedule is not tolerated: "
    assert waits in running.condition("Valid")["message"]


def test_a_reserved_incarnation_without_a_pod_stops_no_roll(running: ModelCluster) -> None:
    running.edit("flights", image=NEW)
    request_roll(running)
    running.refused_in.add("default")  # a quota
    pass_seconds(running, 3)
    assert {"slot": "coordinator", "incarnation": 2} in running.status()["slots"]
    running.edit("flights", image=OLD)
    pass_seconds(running, 1)
    running.refused_in.clear()
    assert running.coordinator().incarnation == 1
    running.edit("flights", podTemplate={"metadata": {"annotations": {"a": "b"}}})
    settle_pod_by_pod(running)
    assert {p.incarnation for p in running.tasks().values()} == {2}


def test_a_working_coordinator_that_is_lost_in_a_roll_is_not_kept(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = leave_unstarted(monkeypatch, running)
    held.add(NEW)
    running.edit("flights", image=NEW)
    request_roll(running)
    pass_seconds(running, 3)
    old = running.raw_pods["flights-coordinator-1"]
    running.kill_node_until_not_ready(old["spec"]["nodeName"])
    pass_seconds(running, 10)
    assert "flights-coordinator-1" not in running.raw_pods


def test_a_roll_across_stream_protocols_is_refused_with_a_message(running: ModelCluster) -> None:
    running.edit("flights", image=NEW)
    request_roll(running)
    running.stream_conflict = [2, 3]  # as the coordinator of the new image reports
    before = set(running.tasks())
    running.settle()
    assert set(images(running, "coordinator").values()) == {NEW}
    assert set(running.tasks()) == before
    message = running.condition("Valid")["message"]
    assert "the roll is refused: stream protocols 2 and 3" in message
    assert "set spec.suspend to true, and back once all tasks have ended" in message
    running.stream_conflict = []
    settle_pod_by_pod(running)
    assert set(images(running, "task").values()) == {NEW}


def test_an_upgrade_across_stream_protocols_names_the_remedy_before_an_edit(
    running: ModelCluster,
) -> None:
    running.stream_protocol = 0  # as a coordinator of an older release, which reports none
    running.settle()
    assert "suspend" not in running.condition("Valid")["message"]
    upgrade(running)
    running.settle()
    message = running.condition("Valid")["message"]
    assert "with that edit set spec.suspend to true, and back once all tasks have ended" in message
    running.edit("flights", queries=[{**q, "priority": 7} for q in flights_spec()["queries"]])
    running.settle()
    message = running.condition("Valid")["message"]
    assert "stream protocols 2 and 3 of running tasks and of those of the image" in message
    running.edit("flights", image="mine:1")  # of an unknown release
    running.settle()
    assert "stream protocol" not in running.condition("Valid")["message"]


def test_stream_protocols_that_do_not_fit_are_reported_without_a_roll(
    running: ModelCluster,
) -> None:
    running.stream_conflict = [2, 3]
    running.settle()
    assert "lost tasks cannot be replaced" in running.condition("Valid")["message"]


def test_a_roll_waits_while_something_is_lost(running: ModelCluster) -> None:
    for name in "bc":
        running.kill_node_until_not_ready(name)
    running.settle()
    running.edit("flights", image=NEW)
    request_roll(running)
    kept = {n for n, p in running.tasks().items() if p.node == "a"}
    running.settle()
    assert kept <= set(running.tasks())


def test_the_annotation_requests_a_roll() -> None:
    meta = {
        "namespace": "default",
        "name": "flights",
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    assert not topology_view({"metadata": meta}).roll
    for value, requested in (("true", True), ("2026-11-22", True), ("false", False), ("", False)):
        annotated = {**meta, "annotations": {names.ANNOTATION_ROLL: value}}
        assert topology_view({"metadata": annotated}).roll is requested
