"""Clusters on which the failure tests do not run, on a kubectl that answers from a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle_testing.harness.cluster_programs import ClusterNotUsable
from rekindle_testing.harness.existing_cluster.cluster import ExistingCluster
from rekindle_testing.harness.existing_cluster.leftovers import CRD
from rekindle_testing.harness.existing_cluster.settings import ExistingClusterSettings

SETTINGS = ExistingClusterSettings("/home/someone/config", "operator:1", "pipelines:1", "nfs")


def _node(name: str, ready: str = "True", **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": conditions}}


def _role(group: str) -> dict[str, Any]:
    annotations = {"meta.helm.sh/release-namespace": "team-a"}
    return {"metadata": {"annotations": annotations}, "rules": [{"apiGroups": [group]}]}


def _crd(*names: str) -> str:
    return json.dumps({"spec": {"versions": [{"name": name} for name in names]}})


NO_SCHEDULE = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
GOOD: dict[str, Any] = {
    "get clusterroles": [_role("")],
    f"get crd {CRD}": "",
    "get nodes": [_node("n1"), _node("n2"), _node("master", taints=[NO_SCHEDULE])],
    "get storageclass nfs": "storageclass/nfs",
}


@pytest.fixture
def cluster(tmp_path: Path) -> ExistingCluster:
    return ExistingCluster(tmp_path, SETTINGS)


def _check(
    cluster: ExistingCluster, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    answers = {**GOOD, **change}

    def kubectl(*arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        command = " ".join(arguments)
        found = next(a for start, a in answers.items() if command.startswith(start))
        return found if isinstance(found, str) else json.dumps({"items": found})

    monkeypatch.setattr(cluster, "kubectl", kubectl)
    monkeypatch.setattr(cluster, "core_api", None, raising=False)
    cluster._refuse_if_unsuitable()


def test_nodes_are_those_that_take_pods(
    cluster: ExistingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [_node("silent", ready="Unknown"), _node("cordoned", unschedulable=True)]
    _check(cluster, monkeypatch, {"get nodes": [*GOOD["get nodes"], *others]})
    assert sorted(cluster.nodes) == ["n1", "n2"]


def test_a_crd_of_the_same_release_is_used(
    cluster: ExistingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {f"get crd {CRD}": _crd("v1alpha1"), "apply --server-side": _crd("v1alpha1")}
    _check(cluster, monkeypatch, same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"get clusterroles": [_role("rekindle.dev")]}, "in namespace team-a watches all"),
        ({f"get crd {CRD}": _crd("v1"), "apply --server-side": _crd("v2")}, "of another release"),
        ({"get nodes": [_node("n1"), _node("n2", ready="False")]}, "1 nodes take pods"),
        ({"get storageclass nfs": ""}, "no StorageClass nfs"),
    ],
)
def test_an_unsuitable_cluster_is_refused(
    cluster: ExistingCluster,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ClusterNotUsable, match=message):
        _check(cluster, monkeypatch, change)
