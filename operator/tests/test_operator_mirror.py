"""Mirrors of objects of the API, and what their informers keep."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from kubernetes.informer import ADDED, DELETED, MODIFIED
from mirror_parts import pod

from rekindle.names import ANNOTATION_FAILED_PLACEMENTS
from rekindle_operator.cluster.convert import lease_view, pod_view
from rekindle_operator.cluster.mirror import Mirror
from rekindle_operator.cluster.model import LeaseView, PodView


class Server:
    def __init__(self) -> None:
        self.items = [pod("a", 1), pod("b", 2)]
        self.version = 2
        self.status = 200
        self.watched_from: list[str] = []

    def list_pods(self, **arguments: Any) -> Any:
        if arguments.get("watch"):
            self.watched_from.append(arguments["resource_version"])
            return SimpleNamespace(status=self.status, reason="")
        body = {"metadata": {"resourceVersion": str(self.version)}, "items": self.items}
        return SimpleNamespace(status=self.status, reason="", data=json.dumps(body))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def mirror(server: Server) -> Mirror[PodView]:
    made = Mirror[PodView]("pods", server.list_pods, pod_view, lambda: None)
    made._informer._initial_list()  # type: ignore[no-untyped-call]
    return made


def watch(mirror: Mirror[PodView], kind: str, raw: dict[str, Any]) -> None:
    """Handle an event as the informer does."""
    raw = copy.deepcopy(raw)
    cache = mirror._informer.cache
    (cache._remove if kind == DELETED else cache._put)(raw)
    mirror._informer._fire(kind, raw)  # type: ignore[no-untyped-call]


def kept(mirror: Mirror[PodView]) -> list[dict[str, Any]]:
    return list(mirror._informer.cache.list())


def names(mirror: Mirror[PodView]) -> set[str]:
    return {v.name for v in mirror.views()}


def test_the_informer_keeps_only_the_identity_of_objects(mirror: Mirror[PodView]) -> None:
    watch(mirror, ADDED, pod("c", 3))
    watch(mirror, MODIFIED, pod("a", 4, nodeName="n"))
    views = {v.name: v for v in mirror.views()}
    assert names(mirror) == {"a", "b", "c"}
    assert views["a"].node == "n"
    assert views["c"].node_selector == {"disk": "fast"}
    assert all(set(raw) == {"metadata"} for raw in kept(mirror))
    assert all(
        set(raw["metadata"]) == {"namespace", "name", "uid", "resourceVersion"}
        for raw in kept(mirror)
    )


def test_a_relist_removes_deleted_objects_and_restores_none(
    mirror: Mirror[PodView], server: Server
) -> None:
    watch(mirror, DELETED, pod("a", 3))
    assert names(mirror) == {"b"}
    server.items, server.version = [pod("d", 5)], 5
    mirror._informer._initial_list()  # type: ignore[no-untyped-call]
    assert names(mirror) == {"d"}


def test_a_late_list_does_not_restore_a_deleted_object(
    mirror: Mirror[PodView], server: Server
) -> None:
    watch(mirror, DELETED, pod("a", 3))
    server.version = 2  # it got a response before the deletion
    mirror.relist()
    assert names(mirror) == {"b"}


def test_an_object_with_a_finalizer_returns_with_the_next_list(
    mirror: Mirror[PodView], server: Server
) -> None:
    kept_back = pod("a", 3)
    kept_back["metadata"]["finalizers"] = ["example.com/wait"]
    mirror.remove_deleted(kept_back)
    assert names(mirror) == {"b"}
    mirror.relist()
    assert names(mirror) == {"a", "b"}


def test_a_relist_does_not_count_as_a_renewal(server: Server) -> None:
    times = iter([10.0, 20.0, 30.0, 40.0])
    mirror = Mirror[LeaseView](
        "leases", server.list_pods, lambda raw: lease_view(raw, next(times)), lambda: None
    )
    mirror._informer._initial_list()  # type: ignore[no-untyped-call]
    server.items = [pod("a", 1), pod("b", 3)]
    mirror._informer._initial_list()  # type: ignore[no-untyped-call]
    assert {v.name: v.seen_at for v in mirror.views()} == {"a": 10.0, "b": 40.0}


def test_an_older_list_does_not_restore_what_was_deleted_here(
    mirror: Mirror[PodView], server: Server
) -> None:
    listed = kept(mirror)[0]
    mirror.remove_deleted(pod("a", 3))
    mirror._informer._fire(MODIFIED, listed)  # type: ignore[no-untyped-call]
    assert names(mirror) == {"b"}


def test_an_event_from_before_a_deletion_does_not_restore_the_object(
    mirror: Mirror[PodView],
) -> None:
    watch(mirror, DELETED, pod("a", 4))
    watch(mirror, MODIFIED, pod("a", 3))
    assert names(mirror) == {"b"}


def test_a_watch_begins_after_the_newest_event(mirror: Mirror[PodView], server: Server) -> None:
    opened = {"watch": True, "resource_version": "2"}  # the informer knows its first list only
    mirror._request(**opened)
    watch(mirror, ADDED, pod("c", 3))
    mirror._request(**opened)
    watch(mirror, DELETED, pod("a", 5))
    mirror._request(**opened)
    assert server.watched_from == ["2", "3", "5"]


def test_a_watch_begins_after_the_newest_list(mirror: Mirror[PodView], server: Server) -> None:
    server.version = 9
    mirror.relist()
    mirror._request(watch=True, resource_version="2")
    assert server.watched_from == ["9"]


def test_a_write_of_this_process_skips_no_events_of_others(
    mirror: Mirror[PodView], server: Server
) -> None:
    mirror.put(pod("a", 7))
    mirror.remove_deleted(pod("b", 8))
    mirror._request(watch=True, resource_version="2")
    assert server.watched_from == ["2"]


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000])
def test_an_annotation_that_is_no_number_counts_as_none(number: str) -> None:
    raw = pod("a", 1)
    raw["metadata"]["annotations"] = {ANNOTATION_FAILED_PLACEMENTS: number}
    assert pod_view(raw).failed_placements == 0


def test_an_object_that_cannot_be_parsed_affects_no_other(
    mirror: Mirror[PodView], server: Server
) -> None:
    unreadable = {"containers": [{"resources": {"requests": {"cpu": "much"}}}]}
    watch(mirror, MODIFIED, pod("a", 3, **unreadable))
    server.items, server.version = [pod("a", 3, **unreadable), pod("c", 4)], 4
    mirror.relist()
    assert names(mirror) == {"a", "c"}


def test_a_refused_list_is_retried_after_a_pause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("rekindle_operator.cluster.mirror.time.sleep", pauses.append)
    made = Mirror[PodView]("pods", server.list_pods, pod_view, lambda: None)
    server.status = 429
    made._listed_at -= 60.0
    with pytest.raises(ApiException):
        made._request(watch=True)
    assert len(pauses) == 1
