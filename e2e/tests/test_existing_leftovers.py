"""What the harness leaves and removes in a cluster of others, on a kubectl that answers from a
table."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rekindle_testing.harness.any_cluster import image_values
from rekindle_testing.harness.cluster_programs import ClusterNotUsable
from rekindle_testing.harness.existing_cluster import leftovers
from rekindle_testing.harness.existing_cluster.cluster import with_fs_group
from rekindle_testing.harness.existing_cluster.leftovers import LABEL_RUN, RunNames
from rekindle_testing.harness.existing_cluster.settings import ExistingClusterSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUN = RunNames("abc")
GIVEN = {
    "NODES": "existing",
    "KUBECONFIG": "/home/someone/config",
    "OPERATOR_IMAGE": "registry:5000/rekindle/operator:1",
    "PIPELINES_IMAGE": "registry:5000/rekindle/pipelines:1@sha256:00ff",
    "STORAGE_CLASS": "nfs",
}


class Kubectl:
    """`answers`: output by the beginning of the command."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.commands: list[str] = []

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        command = " ".join(arguments)
        self.commands.append(command)
        fitting = [a for start, a in self.answers.items() if command.startswith(start)]
        if not fitting:
            return '{"items": []}' if command.endswith("-o json") else ""
        return fitting[0] if isinstance(fitting[0], str) else json.dumps(fitting[0])


def _items(*metadata: dict[str, Any]) -> dict[str, Any]:
    return {"items": [{"kind": "ClusterRole", "metadata": each} for each in metadata]}


# -- settings ---------------------------------------------------------------------------------


def test_settings_are_those_of_the_variables() -> None:
    settings = ExistingClusterSettings.of({**GIVEN, "FS_GROUP": "10001"})
    assert settings.operator_image == GIVEN["OPERATOR_IMAGE"]
    assert (settings.storage_class, settings.fs_group) == ("nfs", 10001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"NODES": ""}, "only with NODES=existing"),
        ({"NODES": "5"}, "only with NODES=existing"),
        ({"KUBECONFIG": ""}, "needs KUBECONFIG"),
        ({"OPERATOR_IMAGE": "", "STORAGE_CLASS": ""}, "needs OPERATOR_IMAGE, STORAGE_CLASS"),
        ({"OPERATOR_IMAGE": "registry:5000/operator"}, "has no tag"),
        ({"PIPELINES_IMAGE": "pipelines"}, "has no tag"),
        ({"PIPELINES_IMAGE": "pipelines@sha256:00ff"}, "has no tag"),
        ({"FS_GROUP": "staff"}, "not the number of a group"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterNotUsable, match=message):
        ExistingClusterSettings.of({**GIVEN, **change})


def test_values_of_the_chart_have_repository_and_tag_apart() -> None:
    values = image_values("image", GIVEN["PIPELINES_IMAGE"])
    repository = "image.repository=registry:5000/rekindle/pipelines"
    assert values == ["--set", f"{repository},image.tag=1@sha256:00ff"]


def test_topologies_get_the_group_of_the_volume() -> None:
    topology: dict[str, Any] = {"kind": "StreamTopology", "spec": {}}
    changed = with_fs_group(topology, 7)
    assert changed["spec"]["podTemplate"]["spec"]["securityContext"] == {"fsGroup": 7}
    assert topology["spec"] == {}
    assert with_fs_group(changed, 8) == changed
    assert with_fs_group(topology, None) is topology
    assert with_fs_group({"kind": "Namespace"}, 7) == {"kind": "Namespace"}


# -- earlier runs -----------------------------------------------------------------------------


def test_earlier_runs_are_found_by_label_and_by_release() -> None:
    release = {"meta.helm.sh/release-namespace": "rekindle-e2e-lost-system"}
    others = {"meta.helm.sh/release-namespace": "team-a"}
    kubectl = Kubectl(
        {
            "get namespaces": _items(
                {"labels": {LABEL_RUN: "abc"}}, {"labels": {LABEL_RUN: "abc"}}
            ),
            "get clusterroles": _items({"annotations": release}, {"annotations": others}, {}),
        }
    )
    assert leftovers.earlier_runs(kubectl) == [RunNames("abc"), RunNames("lost")]


@pytest.mark.parametrize("age_s", [0, 59, 61])
def test_a_run_that_is_alive_is_left_alone(age_s: int) -> None:
    renewed = (NOW - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {"spec": {"holderIdentity": "someone@host", "renewTime": renewed}}
    kubectl = Kubectl({"get lease": lease})
    if age_s > 60:
        leftovers.refuse_if_alive(kubectl, RUN, lambda: NOW)
    else:
        with pytest.raises(
            ClusterNotUsable, match="someone@host runs these tests in namespace rekindle-e2e"
        ):
            leftovers.refuse_if_alive(kubectl, RUN, lambda: NOW)


def test_a_run_without_a_lease_is_not_alive() -> None:
    leftovers.refuse_if_alive(Kubectl({"get lease": ""}), RUN, lambda: NOW)


# -- removal ----------------------------------------------------------------------------------


def _removal(answers: dict[str, Any], releases: str = "rekindle\n") -> tuple[list[str], list[str]]:
    kubectl, helm = Kubectl(answers), Kubectl({"list": releases})
    leftovers.remove(kubectl, helm, RUN, print)
    changed = [c for c in kubectl.commands if not c.startswith("get ")]
    return changed, [c for c in helm.commands if not c.startswith("list ")]


def test_all_that_a_run_made_is_removed_in_order() -> None:
    annotations = {"meta.helm.sh/release-namespace": RUN.operator_namespace}
    own = {"name": "own.rekindle", "annotations": annotations}
    other = {"name": "other", "annotations": {"meta.helm.sh/release-namespace": "team-a"}}
    changed, uninstalled = _removal(
        {
            "get nodes": _items({"name": "n1", "labels": {LABEL_RUN: "abc"}}),
            "get clusterroles": _items(own, other, {"name": "plain"}),
            "get crd": leftovers.CRD,
        }
    )
    assert changed == [
        "uncordon n1",
        f"label node n1 {LABEL_RUN}-",
        f"delete {leftovers.CRD} --all -n rekindle-e2e-abc",
        "delete ClusterRole own.rekindle --ignore-not-found",
        "delete namespace rekindle-e2e-abc rekindle-e2e-abc-system --ignore-not-found",
        f"delete crd {leftovers.CRD} --ignore-not-found",
    ]
    assert len(uninstalled) == 1
    assert uninstalled[0].startswith("uninstall rekindle --namespace rekindle-e2e-abc-system")


def test_a_crd_of_others_stays() -> None:
    changed, _ = _removal({f"get crd {leftovers.CRD}": leftovers.CRD})
    assert not any(c.startswith("delete crd") for c in changed)


def test_a_crd_that_others_use_now_stays() -> None:
    changed, _ = _removal(
        {"get crd": leftovers.CRD, f"get {leftovers.CRD}": _items({"namespace": "team-a"})}
    )
    assert not any(c.startswith("delete crd") for c in changed)
    assert f"label crd {leftovers.CRD} {LABEL_RUN}-" in changed


def test_removal_can_be_repeated() -> None:
    changed, uninstalled = _removal({}, releases="")
    assert changed == [
        "delete namespace rekindle-e2e-abc rekindle-e2e-abc-system --ignore-not-found"
    ]
    assert uninstalled == []
