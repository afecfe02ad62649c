"""The simulated API server: conflicts, preconditions, rules of the CRD, watches."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle_testing.simulation.kube.objects import (
    PODS,
    TOPOLOGIES,
    ApiObjects,
    ApiRequest,
    matches,
)
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.network import API, Network
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

POD_PATH = "/api/v1/namespaces/default/pods"
STATUS_PATH = "/apis/rekindle.dev/v1alpha1/namespaces/default/streamtopologies/t/status"


@pytest.fixture
def objects() -> ApiObjects:
    made = ApiObjects(lambda: 0.0, lambda plural, event: None)
    made.add(PODS, pod("a", node="n"))
    meta = {"name": "t", "namespace": "default", "uid": "u"}
    made.add(TOPOLOGIES, {"metadata": meta, "spec": {}})
    return made


def pod(name: str, node: str | None = None) -> dict[str, Any]:
    spec = {"nodeName": node} if node else {"schedulingGates": [{"name": "g"}]}
    return {"metadata": {"name": name, "namespace": "default", "labels": {"k": "v"}}, "spec": spec}


def status_of(objects: ApiObjects, verb: str, path: str, body: Any = None) -> int:
    return objects.respond(ApiRequest(verb, path, body)).status


def apply(objects: ApiObjects, **status: Any) -> int:
    body = {"metadata": {"uid": "u"}, "status": status}
    return status_of(objects, "PATCH", STATUS_PATH, body)


def test_a_name_is_created_once(objects: ApiObjects) -> None:
    assert status_of(objects, "POST", POD_PATH, pod("b")) == 201
    assert status_of(objects, "POST", POD_PATH, pod("b")) == 409
    assert status_of(objects, "POST", f"{POD_PATH}?dryRun=All", pod("c")) == 201
    assert objects.find(PODS, "c") is None


def test_a_replacement_of_an_older_version_is_a_conflict(objects: ApiObjects) -> None:
    found = objects.respond(ApiRequest("GET", f"{POD_PATH}/a")).body
    assert status_of(objects, "PUT", f"{POD_PATH}/a", found) == 200
    assert status_of(objects, "PUT", f"{POD_PATH}/a", found) == 409


def test_a_bound_pod_is_marked_before_it_is_removed(objects: ApiObjects) -> None:
    wrong = {"preconditions": {"uid": "another"}}
    assert status_of(objects, "DELETE", f"{POD_PATH}/a", wrong) == 409
    assert status_of(objects, "DELETE", f"{POD_PATH}/a") == 200
    marked = objects.find(PODS, "a")
    assert marked is not None
    assert marked["metadata"]["deletionTimestamp"]
    assert status_of(objects, "DELETE", f"{POD_PATH}/a", {"gracePeriodSeconds": 0}) == 200
    assert objects.find(PODS, "a") is None


def test_a_patch_whose_test_fails_changes_nothing(objects: ApiObjects) -> None:
    status_of(objects, "POST", POD_PATH, pod("b"))
    patch = [
        {"op": "test", "path": "/spec/schedulingGates/0/name", "value": "g"},
        {"op": "remove", "path": "/spec/schedulingGates/0"},
    ]
    assert status_of(objects, "PATCH", f"{POD_PATH}/b", patch) == 200
    assert status_of(objects, "PATCH", f"{POD_PATH}/b", patch) == 422


def test_fences_and_incarnations_never_decrease(objects: ApiObjects) -> None:
    assert apply(objects, dataPlane={"fence": 2}) == 200
    assert apply(objects, slots=[{"slot": "s", "incarnation": 3}]) == 200
    assert apply(objects, dataPlane={"fence": 1}) == 422
    assert apply(objects, slots=[{"slot": "s", "incarnation": 2}]) == 422
    found = objects.find(TOPOLOGIES, "t")
    assert found is not None
    assert found["status"]["dataPlane"] == {"fence": 2}
    assert found["status"]["slots"] == [{"slot": "s", "incarnation": 3}]


def test_selectors_name_labels_and_values() -> None:
    assert matches(pod("a"), "k=v,k")
    assert not matches(pod("a"), "k=w")
    assert not matches(pod("a"), "other")


def test_a_watch_whose_version_has_expired_goes_on_after_a_list() -> None:
    scheduler = Scheduler(0)
    server = SimulatedApiServer(scheduler, Network(scheduler))
    seen: list[str] = []
    expirations: list[bool] = []
    watch = server.watch(
        SimulatedProcess(scheduler, "client"),
        PODS,
        0,  # after this version
        lambda event: seen.append(event.raw["metadata"]["name"]),
        expired=lambda: expirations.append(True),
    )
    server.expire_watches("client")
    server.objects.add(PODS, pod("a"))
    scheduler.run_until(5.0)
    assert (seen, expirations) == ([], [True])
    watch.resume(server.objects.version)
    server.objects.add(PODS, pod("b"))
    scheduler.run_until(10.0)
    assert (seen, expirations) == (["b"], [True])


def test_a_watch_goes_on_where_it_was_interrupted() -> None:
    scheduler = Scheduler(0)
    server = SimulatedApiServer(scheduler, network := Network(scheduler))
    seen: list[str] = []
    process = SimulatedProcess(scheduler, "client")
    server.watch(
        process,
        PODS,
        after_version=0,
        deliver=lambda event: seen.append(event.raw["metadata"]["name"]),
    )
    server.objects.add(PODS, pod("a"))
    scheduler.run_until(1.0)
    assert seen == ["a"]
    network.disconnect(API, "client")
    server.objects.add(PODS, pod("b"))
    scheduler.run_until(5.0)
    assert seen == ["a"]
    network.reconnect(API, "client")
    server.stall("client", 3.0)
    scheduler.run_until(7.0)
    assert seen == ["a"]
    scheduler.run_until(10.0)
    assert seen == ["a", "b"]
