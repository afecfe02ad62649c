"""The disruption budget of a topology, on a real API server: which evictions it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle import names
from rekindle_operator.cluster.convert import topology_view
from rekindle_operator.resources.disruption import disruption_budget
from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.api

NAMESPACE = "disruption"
TOPOLOGY = {
    "name": "guarded",
    "namespace": NAMESPACE,
    "uid": "0f3c",
    "creationTimestamp": "2026-01-01T00:00:00Z",
}


def create(control_plane: ControlPlane, manifest: dict[str, Any]) -> None:
    control_plane.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(manifest))


def pod(name: str) -> dict[str, Any]:
    """On a node that nobody runs."""
    container = {"name": "task", "image": "none"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {names.LABEL_TOPOLOGY: "guarded"}},
        "spec": {"nodeName": "nowhere", "containers": [container]},
    }


def set_ready(control_plane: ControlPlane, name: str, status: str) -> None:
    patch = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]}}
    control_plane.kubectl(
        "patch", "pod", name, "-n", NAMESPACE, "--subresource=status", "-p", json.dumps(patch)
    )


def evict(control_plane: ControlPlane, name: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    control_plane.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def test_no_pod_that_is_ready_may_be_evicted(control_plane: ControlPlane) -> None:
    control_plane.kubectl("create", "namespace", NAMESPACE)
    budget = disruption_budget(topology_view({"metadata": TOPOLOGY}))
    del budget["metadata"]["ownerReferences"]  # the garbage collector would not find its owner
    create(control_plane, budget)
    for name in ("guarded-0", "guarded-1", "guarded-2"):
        create(control_plane, pod(name))
        set_ready(control_plane, name, "True")

    def healthy() -> str:
        return control_plane.kubectl(
            "get", "pdb", "guarded-pods", "-n", NAMESPACE, "-o", "jsonpath={.status.currentHealthy}"
        )

    eventually(lambda: healthy() == "3", 60)
    for name in ("guarded-0", "guarded-1", "guarded-2"):
        with pytest.raises(KubectlError, match="disruption budget"):
            evict(control_plane, name)
    set_ready(control_plane, "guarded-1", "False")
    eventually(lambda: healthy() == "2", 60)
    evict(control_plane, "guarded-1")
    with pytest.raises(KubectlError, match="disruption budget"):
        evict(control_plane, "guarded-0")
    control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
