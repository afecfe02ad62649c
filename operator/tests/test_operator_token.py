"""The topology's token: created once, given to its pods by reference, and not readable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from flights_example import flights_spec
from kubernetes import client
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.execute import Executor
from rekindle_operator.reconcile.actions import (
    CreatePod,
    CreateTokenSecret,
    EnsureAccess,
    TopologyActions,
)
from rekindle_operator.reconcile.core import reconcile


def tokens_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    env = [e for c in pod["spec"]["containers"] for e in c.get("env", [])]
    return [e["valueFrom"]["secretKeyRef"] for e in env if e["name"] == "REKINDLE_TOKEN"]


def first_actions(cluster: ModelCluster) -> list[Any]:
    """Actions of the pass that creates the first pods."""
    for _ in range(5):
        actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        if any(isinstance(a, CreatePod) for a in actions):
            return actions
        cluster.apply(actions)
    raise AssertionError("no pod is created")


def test_all_pods_refer_to_the_token_of_their_own_topology(cluster: ModelCluster) -> None:
    cluster.add_topology("other", flights_spec())
    for node in "abc":
        cluster.add_node(node)
    cluster.settle()
    owners = {
        (pod["metadata"]["labels"][names.LABEL_TOPOLOGY], ref["name"], ref["key"])
        for pod in cluster.raw_pods.values()
        for ref in tokens_of(pod)
    }
    assert all(len(tokens_of(pod)) == 1 for pod in cluster.raw_pods.values())
    assert {owner for owner, _, _ in owners} == {"flights", "other"}
    assert len({name for _, name, _ in owners}) == len(owners) == 2


def test_a_pod_template_cannot_replace_the_token(cluster: ModelCluster) -> None:
    env = [{"name": "REKINDLE_TOKEN", "value": "guessed"}]
    template = {"spec": {"containers": [{"name": "task", "env": env}]}}
    cluster.add_topology("other", flights_spec() | {"podTemplate": template})
    for node in "abc":
        cluster.add_node(node)
    cluster.settle()
    assert all(tokens_of(pod) for pod in cluster.raw_pods.values())


def test_the_token_is_created_before_the_pods_that_need_it(cluster: ModelCluster) -> None:
    actions = first_actions(cluster)
    kinds = [type(action) for action in actions]
    assert kinds.index(CreateTokenSecret) < kinds.index(CreatePod)


def test_the_token_is_owned_and_immutable_without_its_value(cluster: ModelCluster) -> None:
    actions = first_actions(cluster)
    (token,) = (a for a in actions if isinstance(a, CreateTokenSecret))
    assert token.manifest["immutable"] is True
    assert token.manifest["metadata"]["ownerReferences"][0]["name"] == "flights"
    assert not {"data", "stringData"} & token.manifest.keys()


def test_no_role_of_a_coordinator_may_read_secrets(cluster: ModelCluster) -> None:
    actions = first_actions(cluster)
    (access,) = (a for a in actions if isinstance(a, EnsureAccess))
    rules = [r for m in access.manifests if m["kind"] == "Role" for r in m["rules"]]
    assert rules
    assert not any({"secrets", "*"} & set(rule["resources"]) for rule in rules)


@dataclass
class Response:
    status: int
    body: dict[str, Any]
    reason: str = ""

    def read(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass
class Recording(client.ApiClient):
    """Responds to each POST with `status`."""

    status: int = 201
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def call_api(
        self, method: str, url: str, header_params: Any = None, body: Any = None, *_: Any, **__: Any
    ) -> Any:
        assert (method, url.rpartition("/")[2]) == ("POST", "secrets")
        self.bodies.append(body)
        return Response(self.status, {"kind": "Secret"})


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


def executor(api: Recording, now: list[float]) -> Executor:
    cluster = ClusterCache(api, None, lambda: now[0])
    return Executor(
        api,
        cluster,
        identity="me",
        status_interval_s=2.0,
        clock=lambda: now[0],
        may_act=lambda: True,
    )


def token(name: str) -> TopologyActions:
    secret = {"kind": "Secret", "metadata": {"name": name}, "immutable": True}
    return TopologyActions(f"default/{name}", (CreateTokenSecret("default", secret),))


def test_each_token_is_random(now: list[float]) -> None:
    api = Recording()
    executor(api, now).run([token("one"), token("two")])
    values = [body["stringData"]["token"] for body in api.bodies]
    assert len(set(values)) == 2
    assert all(len(value) >= 43 for value in values)


def test_an_existing_token_is_kept(now: list[float]) -> None:
    api = Recording(status=409)
    runner = executor(api, now)
    runner.run([token("one")])
    runner.run([token("one")])
    assert len(api.bodies) == 1
    now[0] += 61.0  # it may have been deleted meanwhile
    runner.run([token("one")])
    assert len(api.bodies) == 2
