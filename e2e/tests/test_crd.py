"""The CRD in a real API server: refused values, defaults, and fields that never decrease."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.topology.load import load_spec, load_topology
from rekindle.topology.validate import validate
from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.process_node.node_admin import ApiRefusal, JsonApi
from rekindle_testing.fixtures.bad_manifests import (
    BadManifest,
    bad_manifests,
    good_manifest,
)
from rekindle_testing.paths import ROOT

pytestmark = pytest.mark.api

CRD = ROOT / "crds/rekindle.dev_streamtopologies.yaml"
EXAMPLE = ROOT / "examples/flights/topology.yaml"
TOPOLOGIES = "/apis/rekindle.dev/v1alpha1/namespaces/crd/streamtopologies"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def api(api_server: ControlPlane) -> Iterator[ControlPlane]:
    """With a namespace."""
    api_server.kubectl("create", "namespace", "crd")
    yield api_server
    api_server.kubectl("delete", "namespace", "crd", "--wait=false")


@pytest.fixture(scope="module")
def json_api(api: ControlPlane) -> JsonApi:
    return JsonApi(api.kubeconfig)


def create(api: ControlPlane, manifest: dict[str, Any]) -> dict[str, Any]:
    """The object in the API server."""
    done = api.kubectl("create", "-n", "crd", "-o", "json", "-f", "-", stdin=json.dumps(manifest))
    found: dict[str, Any] = json.loads(done)
    return found


def try_to_create(json_api: JsonApi, manifest: dict[str, Any]) -> dict[str, Any]:
    """Like `kubectl create --dry-run=server`. Raises ApiRefusal."""
    return json_api.call("POST", f"{TOPOLOGIES}?dryRun=All&fieldValidation=Strict", manifest)


def fresh(manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    made = copy.deepcopy(manifest or good_manifest())
    made["metadata"]["name"] = f"t{next(_numbers)}"
    return made


def patch_status(api: ControlPlane, name: str, status: dict[str, Any] | None) -> None:
    flags = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    api.kubectl("patch", "topo", name, "-n", "crd", *flags)


@pytest.mark.parametrize("bad", bad_manifests(), ids=lambda b: b.name)
def test_bad_manifests_are_refused_with_the_expected_message(
    json_api: JsonApi, bad: BadManifest
) -> None:
    if bad.server is None:
        try_to_create(json_api, bad.manifest)
        name, spec = load_topology(bad.manifest)
        assert validate(spec, name)
        return
    with pytest.raises(ApiRefusal) as caught:
        try_to_create(json_api, bad.manifest)
    assert bad.server in str(caught.value)


@pytest.mark.parametrize("manifest", [EXAMPLE, None], ids=["flights", "good"])
def test_a_good_manifest_is_accepted_by_both(json_api: JsonApi, manifest: Path | None) -> None:
    """By the API server and by `validate`."""
    given = yaml.safe_load(manifest.read_text()) if manifest else good_manifest()
    name, spec = load_topology(try_to_create(json_api, given))
    assert validate(spec, name) == []


def test_defaults_of_the_api_server_and_the_spec_are_equal(json_api: JsonApi) -> None:
    for given in (good_manifest(), yaml.safe_load(EXAMPLE.read_text())):
        made = try_to_create(json_api, given)
        assert load_spec(made["spec"]) == load_spec(given["spec"])
        assert made["spec"] != given["spec"]


def test_the_epoch_interval_cannot_be_changed_or_removed(api: ControlPlane) -> None:
    name = create(api, fresh())["metadata"]["name"]
    for value in ("2s", None):
        change = json.dumps({"spec": {"epochInterval": value}})
        if value is None:  # the default is set: nothing has changed
            api.kubectl("patch", "topo", name, "-n", "crd", "--type=merge", "-p", change)
            continue
        with pytest.raises(KubectlError, match="epochInterval cannot be changed"):
            api.kubectl("patch", "topo", name, "-n", "crd", "--type=merge", "-p", change)


def test_the_checkpoint_store_cannot_be_changed(api: ControlPlane) -> None:
    name = create(api, fresh())["metadata"]["name"]
    for field, value in (("store", "file:///elsewhere"), ("volume", "another"), ("volume", None)):
        change = json.dumps({"spec": {"checkpoint": {field: value}}})
        with pytest.raises(KubectlError, match=f"{field} cannot be changed"):
            api.kubectl("patch", "topo", name, "-n", "crd", "--type=merge", "-p", change)


def test_the_fence_never_decreases_and_the_report_stays(api: ControlPlane) -> None:
    name = create(api, fresh())["metadata"]["name"]
    patch_status(api, name, {"dataPlane": {"fence": 3, "headEpoch": 5}})
    patch_status(api, name, {"dataPlane": {"fence": 3, "headEpoch": 4}})
    with pytest.raises(KubectlError, match="the fence cannot decrease"):
        patch_status(api, name, {"dataPlane": {"fence": 2}})
    with pytest.raises(KubectlError, match="dataPlane cannot be removed"):
        patch_status(api, name, {"dataPlane": None})
    with pytest.raises(KubectlError, match="dataPlane cannot be removed"):
        patch_status(api, name, None)
    patch_status(api, name, {"dataPlane": {"fence": 4}, "phase": "Running"})


def test_incarnations_never_decrease(api: ControlPlane) -> None:
    name = create(api, fresh())["metadata"]["name"]
    slots = [{"slot": "a/0/0", "incarnation": 2}, {"slot": "coordinator", "incarnation": 1}]
    patch_status(api, name, {"slots": slots})
    patch_status(api, name, {"slots": [slots[0] | {"incarnation": 3}, slots[1]]})
    with pytest.raises(KubectlError, match="an incarnation cannot decrease"):
        patch_status(api, name, {"slots": [slots[0] | {"incarnation": 1}, slots[1]]})


def test_writes_of_spec_and_status_are_separate(api: ControlPlane) -> None:
    name = create(api, fresh() | {"status": {"phase": "Running"}})["metadata"]["name"]
    patch_status(api, name, {"dataPlane": {"fence": 1}})
    change = json.dumps({"spec": {"suspend": True}, "status": None})
    api.kubectl("patch", "topo", name, "-n", "crd", "--type=merge", "-p", change)
    now = json.loads(api.kubectl("get", "topo", name, "-n", "crd", "-o", "json"))
    assert now["spec"]["suspend"] is True
    assert now["status"] == {"dataPlane": {"fence": 1}}


def test_kubectl_prints_whether_it_is_ready_and_why(api: ControlPlane) -> None:
    name = create(api, fresh())["metadata"]["name"]
    ready = {
        "type": "Ready",
        "status": "Unknown",
        "reason": "NoReport",
        "message": "no report",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status: dict[str, Any] = {
        "phase": "Running",
        "queriesLive": "1/2",
        "redundancy": "3/4",
        "lag": "0.4s",
    }
    status |= {"conditions": [ready]}
    patch_status(api, name, status)
    header, row = api.kubectl("get", "topo", name, "-n", "crd").splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "PHASE", "QUERIES", "LAG", "AGE"]
    assert row.split()[:6] == [name, "Unknown", "NoReport", "Running", "1/2", "0.4s"]
    wide, more = api.kubectl("get", "topo", name, "-n", "crd", "-o", "wide").splitlines()
    assert wide.split()[7:] == ["REDUNDANCY", "CHECKPOINT", "DEGRADED", "MESSAGE"]
    assert "3/4" in more
    assert more.rstrip().endswith("no report")


def test_apply_of_the_data_plane_keeps_the_operators_status(api: ControlPlane) -> None:
    name = create(api, fresh())["metadata"]["name"]
    patch_status(api, name, {"slots": [{"slot": "a/0/0", "incarnation": 1}]})
    task = {"slot": "a/0/0", "incarnation": 1, "phase": "Live", "stableEpoch": 7}
    task |= {"problem": "the store is down", "savingFails": True}
    data = {"fence": 1, "tasks": [task], "queries": [{"name": "q", "lagSeconds": 0.4}]}
    data["checkpointProblems"] = [{"kind": "OfANewerCoordinator", "message": "x"}]
    applied = {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": name},
        "status": {"dataPlane": data},
    }
    flags = ("--server-side", "--subresource=status", "--field-manager=rekindle-coordinator")
    api.kubectl("apply", "-n", "crd", *flags, "-f", "-", stdin=json.dumps(applied))
    status = json.loads(api.kubectl("get", "topo", name, "-n", "crd", "-o", "json"))["status"]
    assert status["dataPlane"] == data
    assert status["slots"] == [{"slot": "a/0/0", "incarnation": 1}]


def test_a_status_replaces_only_the_version_that_it_names(api: ControlPlane) -> None:
    """As the operator writes it: else an earlier leader's would remove a reservation."""
    found = create(api, fresh())
    name, version = found["metadata"]["name"], found["metadata"]["resourceVersion"]
    flags = ("--server-side", "--subresource=status", "--field-manager=rekindle-operator")

    def apply(slots: list[str]) -> None:
        applied = {
            "apiVersion": "rekindle.dev/v1alpha1",
            "kind": "StreamTopology",
            "metadata": {"name": name, "resourceVersion": version},
            "status": {"slots": [{"slot": slot, "incarnation": 1} for slot in slots]},
        }
        more = (*flags, "--force-conflicts")
        api.kubectl("apply", "-n", "crd", *more, "-f", "-", stdin=json.dumps(applied))

    apply(["a/0/0", "b/0/0"])
    with pytest.raises(KubectlError, match="the object has been modified"):
        apply(["a/0/0"])
