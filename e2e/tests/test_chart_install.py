"""Helm in a real API server: releases side by side, and the upgrade as the documentation has it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart import CHART, VALUE_SETS, rendered

from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.toolchain import ensure_helm

pytestmark = pytest.mark.api

CRD = next((CHART / "crds").glob("*.yaml"))


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
def helm(plane: ControlPlane) -> Iterator[Helm]:
    """With two releases of one name."""
    helm = Helm(plane)
    for namespace in ("one", "two"):
        plane.kubectl("create", "namespace", f"team-{namespace}")
        watched = f"watchNamespace=team-{namespace}"
        place = ("--namespace", namespace, "--create-namespace")
        helm("install", "rekindle", str(CHART), *place, "--set", watched)
    yield helm
    for namespace in ("one", "two"):
        helm("uninstall", "rekindle", "--namespace", namespace)
        plane.kubectl("delete", "namespace", namespace, f"team-{namespace}", "--wait=false")


def test_releases_of_one_name_run_in_two_namespaces(plane: ControlPlane, helm: Helm) -> None:
    listed = helm("list", "--all-namespaces", "--output", "yaml")
    assert [r["status"] for r in yaml.safe_load(listed)] == ["deployed", "deployed"]
    for namespace in ("one", "two"):
        plane.kubectl("get", "deployment/rekindle", "-n", namespace)
        plane.kubectl("get", f"priorityclass/{namespace}.rekindle-task")


def test_a_second_operator_for_a_namespace_is_refused(helm: Helm) -> None:
    place = ("--namespace", "three", "--create-namespace")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        helm("install", "other", str(CHART), *place, "--set", "watchNamespace=team-one")
    assert 'Role "rekindle-operator-topologies" in namespace "team-one" exists' in (
        refused.value.stderr
    )


def test_the_documented_upgrade_replaces_the_crd(
    plane: ControlPlane, helm: Helm, tmp_path: Path
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
        columns = plane.kubectl(
            *("get", "crd", crd["metadata"]["name"]),
            *("-o", "jsonpath={.spec.versions[0].additionalPrinterColumns[0].name}"),
        )
        assert columns == "Newer"


@pytest.mark.parametrize("values", VALUE_SETS)
def test_the_api_server_accepts_all_rendered_objects(plane: ControlPlane, values: str) -> None:
    for namespace in ("team-a", "system"):  # those that the values name
        if f"namespace/{namespace}" not in plane.kubectl("get", "namespaces", "-o", "name"):
            plane.kubectl("create", "namespace", namespace)
    plane.kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=rendered(values, release="dry", namespace="system"),
    )


def test_permissions_are_limited_to_the_namespace(plane: ControlPlane, helm: Helm) -> None:
    def may(verb: str, what: str, namespace: str) -> bool:
        user = "--as=system:serviceaccount:one:rekindle"
        try:
            return (
                plane.kubectl("auth", "can-i", verb, what, "-n", namespace, user).strip() == "yes"
            )
        except KubectlError:
            return False

    for verb, what in (("create", "pods"), ("create", "roles.rbac.authorization.k8s.io")):
        assert may(verb, what, "team-one")
        assert not may(verb, what, "team-two")
        assert not may(verb, what, "default")
    assert may("list", "nodes", "default")
    assert may("list", "pods", "team-two")
    assert may("delete", "pods", "one")
    assert not may("get", "secrets", "team-one")
    assert not may("list", "configmaps", "team-two")
