"""Objects that are nested deep, and lists of topologies that fail."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from model_cluster import ModelCluster
from model_objects import topology_json

from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.loop import TopologyLister
from rekindle_operator.nesting import MAX_SPEC_DEPTH, is_too_deep, raise_recursion_limit
from rekindle_operator.settings import OperatorSettings

_API_SERVER_DEPTH = 10_000


@pytest.fixture
def operator_limit() -> Iterator[None]:
    """The recursion limit of the operator's process."""
    before = sys.getrecursionlimit()
    raise_recursion_limit()
    yield
    sys.setrecursionlimit(before)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def relister(
    cluster: ClusterCache, monkeypatch: pytest.MonkeyPatch, listing: Any
) -> TopologyLister:
    made = TopologyLister(client.ApiClient(), cluster, OperatorSettings())
    monkeypatch.setattr(made._custom, "list_cluster_custom_object", lambda *_, **__: listing())
    return made


def cache() -> ClusterCache:
    return ClusterCache(client.ApiClient(), None, lambda: 1000.0)


@pytest.mark.usefixtures("operator_limit")
def test_the_deepest_object_of_the_api_server_can_be_parsed() -> None:
    levels = _API_SERVER_DEPTH
    text = '{"items":[' + '{"a":' * levels + "1" + "}" * levels + "]}"
    parsed: list[Any] = []
    thread = threading.Thread(target=lambda: parsed.append(json.loads(text)))
    thread.start()
    thread.join()
    assert json.loads(text) == parsed[0]
    assert json.dumps(parsed[0], separators=(",", ":")) == text


@pytest.mark.usefixtures("operator_limit")
def test_an_edit_that_is_nested_deep_is_refused(running: ModelCluster) -> None:
    running.edit("flights", podTemplate={"spec": nested(9_990)})
    running.kill_node_until_not_ready("a")
    running.settle()
    valid = running.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("False", "TooDeep")
    assert "generation 1 keeps running" in valid["message"]
    assert not [p.name for p in running.tasks().values() if p.node == "a"]


@pytest.mark.parametrize("levels", [MAX_SPEC_DEPTH - 1, MAX_SPEC_DEPTH])
def test_the_depth_of_a_spec_is_limited(levels: int) -> None:
    assert is_too_deep(nested(levels)) is (levels >= MAX_SPEC_DEPTH)
    assert is_too_deep([nested(levels - 1), {}]) is (levels >= MAX_SPEC_DEPTH)


def test_a_topology_that_cannot_be_parsed_hides_no_other(
    cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = topology_json(cluster.topologies["flights"])
    bad = {"metadata": {"namespace": "default", "name": "bad", "uid": "uid-bad"}}
    listed = {"metadata": {"resourceVersion": "9"}, "items": [bad, good]}
    found = cache()
    assert relister(found, monkeypatch, lambda: listed).list_once()
    assert [t.name for t in found.snapshot().topologies] == ["flights"]


def test_an_unexpected_error_is_logged_and_the_list_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[Any] = [RecursionError("too deep")] * 3

    def listing() -> Any:
        if failures:
            raise failures.pop()
        return {"metadata": {"resourceVersion": "9"}, "items": []}

    found = cache()
    made = relister(found, monkeypatch, listing)
    assert [made.list_again() for _ in range(3)] == [1.0, 2.0, 4.0], "seconds until the next"
    assert found.stalled_watches == ("streamtopologies",)
    assert made.list_again() == OperatorSettings().timing.resync_s
    assert not found.stalled_watches
