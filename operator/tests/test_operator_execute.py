"""Doing what reconcile asks for, against an API server that refuses pods."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from kubernetes import client

from rekindle_operator.cluster.model import SlotRef
from rekindle_operator.cluster.store import Cluster
from rekindle_operator.execute import Executor
from rekindle_operator.reconcile.actions import CreateConfig, CreatePod, DeletePod, TryPods, Turn

REF = SlotRef("uid", "seg/0/0", 2)


@dataclass
class Answer:
    status: int
    body: dict[str, Any]
    reason: str = ""

    def read(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass
class Refusing(client.ApiClient):
    """Refuses what is made with `status`; what is there already belongs to `owner`."""

    status: int = 403
    says: str = "exceeded quota: pods"
    owner: str = REF.topology_uid
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def call_api(self, method: str, url: str, *_: Any, **__: Any) -> Any:
        self.calls.append(f"{method} {url.rpartition('/')[2]}")
        if method == "POST":
            return Answer(self.status, {"message": self.says})
        return Answer(
            200, {"kind": "Status", "metadata": {"ownerReferences": [{"uid": self.owner}]}}
        )


_REMOVAL = DeletePod("default", "old", "u", None, "why")


def run(api: Refusing) -> Cluster:
    cluster = Cluster(api, None, lambda: 1000.0)
    executor = Executor(api, cluster, "me", 2.0, lambda: 1000.0, lambda: True)
    meta = {"name": "new", "ownerReferences": [{"uid": REF.topology_uid}]}
    create = CreatePod("default", {"kind": "Pod", "metadata": meta}, REF, lost_at=990.0)
    executor.run([Turn("default/t", (create, _REMOVAL))])
    return cluster


def test_pods_are_tried_strictly_so_that_a_misspelt_field_is_a_problem_of_the_template() -> None:
    api = Refusing(status=400, says='strict decoding error: unknown field "spec.nodeSelectr"')
    cluster = Cluster(api, None, lambda: 1000.0)
    pods = (("spec.podTemplate", {"kind": "Pod"}),)
    executor = Executor(api, cluster, "me", 2.0, lambda: 1000.0, lambda: True)
    executor.run([Turn("default/t", (TryPods("default", "u", 3, pods),))])
    assert api.calls == ["POST pods?dryRun=All&fieldValidation=Strict"]
    (problem,) = cluster.snapshot().trials["u", 3].problems
    assert (problem.path, problem.reason) == ("spec.podTemplate", "PodRefused")
    assert 'unknown field "spec.nodeSelectr"' in problem.message
    assert "correct spec.podTemplate" in problem.hint


def test_a_refused_pod_ends_no_turn_and_is_remembered() -> None:
    api = Refusing()
    refusal = run(api).snapshot().refusals[REF]
    assert api.calls == ["POST pods", "DELETE old"]
    assert (refusal.message, refusal.lost_at) == ("exceeded quota: pods", 990.0)
    assert refusal.again_at > 1000.0


def test_an_api_server_in_trouble_ends_the_turn_since_the_pod_may_have_been_made() -> None:
    api = Refusing(status=500)
    assert run(api).snapshot().refusals == {}
    assert api.calls == ["POST pods"]


@pytest.mark.parametrize(("owner", "goes_on"), [("uid", True), ("of the topology before", False)])
def test_a_record_of_the_topology_that_had_the_name_before_is_not_taken_for_ones_own(
    owner: str, goes_on: bool
) -> None:
    api = Refusing(409, "already exists", owner=owner)
    executor = Executor(api, Cluster(api, None, lambda: 0.0), "me", 2.0, lambda: 0.0, lambda: True)
    meta = {"name": "t-g1", "ownerReferences": [{"uid": "uid"}]}
    actions = CreateConfig("default", {"kind": "ConfigMap", "metadata": meta}), _REMOVAL
    executor.run([Turn("default/t", actions)])
    assert api.calls == ["POST configmaps", "GET t-g1", *["DELETE old"] * goes_on]


def test_a_pod_of_the_topology_that_had_the_name_before_is_waited_for_alone() -> None:
    api = Refusing(409, "already exists", owner="of the topology before")
    refusal = run(api).snapshot().refusals[REF]
    assert "must be deleted first" in refusal.message
    assert api.calls == ["POST pods", "GET new", "DELETE old"]
