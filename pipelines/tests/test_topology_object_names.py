"""Names of Kubernetes objects and images that a spec refers to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rekindle.errors import InvalidTopology
from rekindle.topology.checks.object_names import DNS_SUBDOMAIN, IMAGE
from rekindle.topology.load import load_topology
from rekindle.topology.validate import validate
from rekindle_testing.fixtures.bad_manifests import good_manifest
from rekindle_testing.fixtures.crd import resource_schema

_DIGEST = "sha256:" + "0123456789abcdef" * 4


def paths_of_problems(changes: dict[str, Any], *, skip_cluster_checks: bool = False) -> list[str]:
    manifest = good_manifest()
    manifest["spec"]["checkpoint"] |= changes.pop("checkpoint", {})
    manifest["spec"] |= changes
    try:
        name, spec = load_topology(manifest)
    except InvalidTopology as error:
        return [p.path for p in error.problems]
    return [p.path for p in validate(spec, name, skip_cluster_checks=skip_cluster_checks)]


@pytest.mark.parametrize(
    "image",
    [
        "machine",
        "rekindle/pipelines:dev",
        "localhost:5000/rekindle/pipelines",
        "Registry.example:443/a/b__c/d---e.f:V1_2-x",
        f"registry.example/rekindle/pipelines@{_DIGEST}",
        f"rekindle/pipelines:0.1.0@{_DIGEST}",
        "[2001:db8::1]:5000/rekindle/pipelines:0.1.0",
        "a:" + "t" * 128,
    ],
)
def test_names_of_images_are_accepted(image: str) -> None:
    assert paths_of_problems({"image": image}) == []


@pytest.mark.parametrize(
    "image",
    [
        "",
        " machine",
        "machine\n",
        "x:0.1.0:0.1.0",
        "rekindle/Pipelines:dev",
        "https://registry.example/rekindle/pipelines",
        "registry.example/rekindle/pipelines:",
        "registry.example//pipelines",
        "rekindle/pipelines@sha256:0123",
        "my_registry:5000/pipelines",
        "a_-b",
        "a:" + "t" * 129,
    ],
)
def test_invalid_names_of_images_are_refused(image: str) -> None:
    assert paths_of_problems({"image": image}) == ["spec.image"]


@pytest.mark.parametrize("name", ["s3-rekindle", "a", "0", "a.b-c.d", "a--b", "a" * 253])
def test_names_of_objects_are_accepted(name: str) -> None:
    secrets = [{"name": name}]
    changes: dict[str, Any] = {"imagePullSecrets": secrets, "serviceAccountName": name}
    assert paths_of_problems(changes | {"checkpoint": {"volume": name, "secretRef": name}}) == []


@pytest.mark.parametrize(
    "name", ["", "Rekindle_PVC", "s3_rekindle", "-a", "a-", "a..b", ".a", "a/b", "a\n", "a" * 254]
)
def test_invalid_names_of_objects_are_refused(name: str) -> None:
    secrets = [{"name": "registry"}, {"name": name}]
    changes: dict[str, Any] = {"imagePullSecrets": secrets, "serviceAccountName": name}
    found = paths_of_problems(changes | {"checkpoint": {"volume": name, "secretRef": name}})
    assert {
        "spec.checkpoint.secretRef",
        "spec.checkpoint.volume",
        "spec.serviceAccountName",
        "spec.imagePullSecrets[1].name",
    } <= set(found)


def test_a_local_run_needs_no_object_of_a_cluster() -> None:
    assert (
        paths_of_problems({"image": "x:1:2", "serviceAccountName": "A"}, skip_cluster_checks=True)
        == []
    )


def test_the_crd_has_the_same_patterns() -> None:
    spec = resource_schema()["properties"]["spec"]["properties"]
    checkpoint = spec["checkpoint"]["properties"]
    secret = spec["imagePullSecrets"]["items"]["properties"]["name"]
    named = (checkpoint["volume"], checkpoint["secretRef"], spec["serviceAccountName"], secret)
    assert {field["pattern"] for field in named} == {f"^{DNS_SUBDOMAIN}$"}
    assert spec["image"]["pattern"] == f"^{IMAGE}$"


@pytest.mark.parametrize("text", ["a" * 100_000 + "_", "a." * 50_000, "a-" * 50_000 + "/"])
def test_long_names_are_refused_at_once(text: str) -> None:
    assert not re.fullmatch(IMAGE, text)
    assert not re.fullmatch(DNS_SUBDOMAIN, text)
