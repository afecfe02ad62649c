"""Helm in a real API server: releases side by side, and the upgrade as the documentation has it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart import CHART, VALUE_SETS, objects

from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.process_node.node_admin import JsonApi
from rekindle_testing.embedded.toolchain import ensure_helm

pytestmark = pytest.mark.api

CRD = next((CHART / "crds").glob("*.yaml"))
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_PATHS = {  # of what the chart has
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "Role": f"{_RBAC}/namespaces/{{}}/roles",
    "RoleBinding": f"{_RBAC}/namespaces/{{}}/rolebindings",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}


class Helm:
    def __init__(self, plane: ControlPlane) -> None:
        self._environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}

    def __call__(self, *arguments: str) -> str:
        """Raises CalledProcessError with the output of helm."""
        done = subprocess.run(
            [str(ensure_helm()), *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    """Without the CRD: helm has to install it."""
    control_plane.kubectl("delete", "--ignore-not-found", "-f", str(CRD))
    return control_plane


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> JsonApi:
    return JsonApi(plane.kubeconfig)


@pytest.fixture(scope="module")
def helm(plane: ControlPlane, api: JsonApi) -> Iterator[Helm]:
    """With two releases of one name."""
    helm = Helm(plane)
    for namespace in ("one", "two"):
        create_namespace(api, f"team-{namespace}")
        watched = f"watchNamespace=team-{namespace}"
        place = ("--namespace", namespace, "--create-namespace")
        helm("install", "rekindle", str(CHART), *place, "--set", watched)
    yield helm
    for namespace in ("one", "two"):
        helm("uninstall", "rekindle", "--namespace", namespace)
        for each in (namespace, f"team-{namespace}"):
            api.call("DELETE", f"/api/v1/namespaces/{each}")


def create_namespace(api: JsonApi, name: str) -> None:
    api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})


def test_releases_of_one_name_run_in_two_namespaces(api: JsonApi, helm: Helm) -> None:
    listed = helm("list", "--all-namespaces", "--output", "yaml")
    assert [r["status"] for r in yaml.safe_load(listed)] == ["deployed", "deployed"]
    for namespace in ("one", "two"):
        api.call("GET", f"{_PATHS['Deployment'].format(namespace)}/rekindle")
        api.call("GET", f"{_PATHS['PriorityClass']}/{namespace}.rekindle-task")


def test_a_second_operator_for_a_namespace_is_refused(helm: Helm) -> None:
    place = ("--namespace", "three", "--create-namespace")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        helm("install", "other", str(CHART), *place, "--set", "watchNamespace=team-one")
    assert 'Role "rekindle-operator-topologies" in namespace "team-one" exists' in (
        refused.value.stderr
    )


def test_the_documented_upgrade_replaces_the_crd(
    plane: ControlPlane, api: JsonApi, helm: Helm, tmp_path: Path
) -> None:
    crd = yaml.safe_load(CRD.read_text())
    (version,) = crd["spec"]["versions"]
    version["additionalPrinterColumns"][0]["name"] = "Newer"
    newer = tmp_path / "crds/newer.yaml"
    newer.parent.mkdir()
    newer.write_text(yaml.safe_dump(crd))
    with pytest.raises(KubectlError, match='conflict with "helm"'):
        plane.kubectl("apply", "--server-side", "-f", str(newer.parent))
    for _ in range(2):  # the next upgrade finds kubectl as the owner
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(newer.parent))
        helm("upgrade", "rekindle", str(CHART), "--namespace", "one", "--reset-then-reuse-values")
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
        (served,) = api.call("GET", path)["spec"]["versions"]
        assert served["additionalPrinterColumns"][0]["name"] == "Newer"


@pytest.fixture(scope="module")
def namespaces_of_values(api: JsonApi) -> Iterator[None]:
    """Those that the sets of values name."""
    for name in ("team-a", "system"):
        create_namespace(api, name)
    yield
    for name in ("team-a", "system"):
        api.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.mark.usefixtures("namespaces_of_values")
@pytest.mark.parametrize("values", VALUE_SETS)
def test_the_api_server_accepts_all_rendered_objects(api: JsonApi, values: str) -> None:
    for made in objects(values, release="dry", namespace="system"):
        path = _PATHS[made["kind"]].format(made["metadata"].get("namespace"))
        api.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", made)


def test_permissions_are_limited_to_the_namespace(api: JsonApi, helm: Helm) -> None:
    def may(verb: str, what: str, namespace: str) -> bool:
        resource, _, group = what.partition(".")
        wanted = {"verb": verb, "resource": resource, "group": group, "namespace": namespace}
        review = {
            "spec": {
                "user": "system:serviceaccount:one:rekindle",
                "groups": [
                    "system:serviceaccounts",
                    "system:serviceaccounts:one",
                    "system:authenticated",
                ],
                "resourceAttributes": wanted,
            }
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(api.call("POST", path, review)["status"]["allowed"])

    for verb, what in (("create", "pods"), ("create", "roles.rbac.authorization.k8s.io")):
        assert may(verb, what, "team-one")
        assert not may(verb, what, "team-two")
        assert not may(verb, what, "default")
    assert may("list", "nodes", "")
    assert may("list", "pods", "team-two")
    assert may("delete", "pods", "one")
    assert may("get", "secrets", "team-one")
    assert not may("get", "secrets", "default")
    assert not may("delete", "secrets", "team-one")
    assert not may("list", "configmaps", "team-two")
