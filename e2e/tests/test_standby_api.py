"""A real API server gives a standby to one slot alone, whoever asks for it, and however often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from rekindle import names
from rekindle.topology.model import Slot
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.convert import pod_view
from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.execute import Executor
from rekindle_operator.reconcile.actions import GiveSlot, TopologyActions
from rekindle_operator.resources.standby import give_slot_patch, slot_text
from rekindle_testing.embedded.control_plane import ControlPlane

pytestmark = pytest.mark.api

NAMESPACE = "standbys"
STANDBY = IncarnationRef("uid", "standby/t-standby-1-1", 0)


@pytest.fixture(scope="module")
def api(api_server: ControlPlane) -> Iterator[client.ApiClient]:
    made: Any = config.new_client_from_config(str(api_server.kubeconfig))  # type: ignore[no-untyped-call]  # the client has no types for it
    core: Any = client.CoreV1Api(made)
    core.create_namespace({"metadata": {"name": NAMESPACE}})
    yield made
    core.delete_namespace(NAMESPACE)


@pytest.fixture
def standby(api: client.ApiClient) -> Iterator[dict[str, Any]]:
    core: Any = client.CoreV1Api(api)
    labels = {names.LABEL_ROLE: names.ROLE_STANDBY, names.LABEL_TOPOLOGY: "t", "team": "x"}
    meta = {"name": "t-standby-1-1", "labels": labels, "annotations": {names.ANNOTATION_SLOT: ""}}
    containers = [{"name": "task", "image": "none"}]
    core.create_namespaced_pod(NAMESPACE, {"metadata": meta, "spec": {"containers": containers}})
    yield _read(api)
    core.delete_namespaced_pod("t-standby-1-1", NAMESPACE, grace_period_seconds=0)


def _read(api: Any) -> dict[str, Any]:
    pod = client.CoreV1Api(api).read_namespaced_pod("t-standby-1-1", NAMESPACE)
    return dict(api.sanitize_for_serialization(pod))


def _give(standby: dict[str, Any], partition: int, incarnation: int) -> GiveSlot:
    slot = Slot("segment", partition, 0)
    labels = {
        names.LABEL_ROLE: names.ROLE_TASK,
        names.LABEL_TOPOLOGY: "t",
        names.LABEL_SEGMENT: slot.segment,
        names.LABEL_PARTITION: str(partition),
        names.LABEL_REPLICA: "0",
        names.LABEL_INCARNATION: str(incarnation),
    }
    task = {"metadata": {"labels": labels, "annotations": {names.ANNOTATION_TEMPLATE: "digest"}}}
    view = pod_view(standby)
    patch = give_slot_patch(view, task, slot, incarnation)
    ref = IncarnationRef("uid", slot.key, incarnation)
    return GiveSlot(NAMESPACE, view.name, view.uid, ref, STANDBY, tuple(patch))


def _execute(api: client.ApiClient, *actions: GiveSlot) -> ClusterCache:
    cluster = ClusterCache(api, None, lambda: 1000.0)
    executor = Executor(
        api,
        cluster,
        identity="me",
        status_interval_s=2.0,
        clock=lambda: 1000.0,
        may_act=lambda: True,
        workers=1,
    )
    for action in actions:
        executor.run([TopologyActions(f"{NAMESPACE}/t", (action,), topology_uid="uid")])
    return cluster


def test_a_standby_becomes_the_task_of_the_first_slot_alone(
    api: client.ApiClient, standby: dict[str, Any]
) -> None:
    cluster = _execute(api, _give(standby, 0, 2), _give(standby, 1, 5), _give(standby, 0, 2))
    task = pod_view(_read(api))
    assert (task.role, task.slot, task.incarnation) == ("task", Slot("segment", 0, 0), 2)
    assert task.given_slot == slot_text(Slot("segment", 0, 0), 2)
    assert _read(api)["metadata"]["labels"]["team"] == "x"
    snapshot = cluster.snapshot()
    assert snapshot.uncreated_pods[STANDBY].failures == 2
    assert not snapshot.failures, "the slot gets another pod: nothing is wrong"


def test_a_standby_that_is_another_pod_now_is_left_alone(
    api: client.ApiClient, standby: dict[str, Any]
) -> None:
    other = {**standby, "metadata": {**standby["metadata"], "uid": "other"}}
    _execute(api, _give(other, 0, 2))
    assert pod_view(_read(api)).role == names.ROLE_STANDBY
