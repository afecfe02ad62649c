"""An operator whose CRD in the cluster is older than it is, with a real API server.

`helm upgrade` leaves the CRD as it is. Nodes, kubelets and the data plane are fakes
(`operator_world`); the rest is real.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import START_S, World

from rekindle import names
from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.fixtures.bad_manifests import good_manifest
from rekindle_testing.harness.operator_process import (
    OperatorProcess,
    install_crds,
    operator_kubeconfig,
    wait_until_known,
)
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.api

CRD = ROOT / "crds/rekindle.dev_streamtopologies.yaml"
UPGRADE = ("apply", "--server-side", "--force-conflicts", "-f")
MISSING = ["spec.podTemplate", "status.queries[].priority", "status.redundancy"]
CHECK_INTERVAL_S = 14.0  # between two checks of the CRD
NOTICED_S = 10.0  # before the next check
# Python imports a module of this name before the program: no variable sets the interval.
SITE = f"""
from dataclasses import replace

from rekindle_operator import settings

read = settings.read_settings


def read_settings():
    found = read()
    return replace(found, timing=replace(found.timing, resync_s={CHECK_INTERVAL_S}))


settings.read_settings = read_settings
"""
FIELDS_OF_A_NEWER_COORDINATOR = {
    "newer": 1,
    "checkpoint": {"epoch": 1, "newer": 1},
    "tasks": [{"slot": "s/0/0", "newer": {"a": 1}}],
    "queries": [{"name": "q", "newer": [1]}],
    "checkpointProblems": [{"kind": "Newer", "message": "m", "newer": True}],
}


def crd_without(paths: list[str]) -> str:
    """The CRD of an older version, which lacks these fields."""
    crd = yaml.load(CRD.read_text(), yaml.CSafeLoader)
    for path in paths:
        at = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        *parents, last = path.split(".")
        for name in parents:
            at = at["properties"][name.removesuffix("[]")]
            at = at["items"] if name.endswith("[]") else at
        del at["properties"][last]
    return yaml.safe_dump(crd)


@pytest.fixture(scope="module")
def plane(api_server: ControlPlane) -> Iterator[ControlPlane]:
    yield api_server
    install_crds(api_server)


@pytest.fixture(scope="module")
def kubeconfig(plane: ControlPlane) -> Path:
    """The operator's, with only the permissions that the chart grants."""
    return operator_kubeconfig(plane)


@pytest.fixture
def world(plane: ControlPlane, tmp_path: Path) -> Iterator[World]:
    made = World(plane.kubeconfig, tmp_path, "crd-upgrade")
    for name in ("node-a", "node-b", "node-c"):
        made.add_node(name)
    yield made
    # Nothing ends pods of deleted nodes, and they would keep the volume.
    made.core.delete_collection_namespaced_pod(made.namespace, grace_period_seconds=0)
    made.close()
    wait_for("no volume is left", lambda: not made.core.list_persistent_volume().items)


def install_older(plane: ControlPlane) -> None:
    plane.kubectl(*UPGRADE, "-", stdin=crd_without(MISSING))
    wait_until_known(plane)


def apply_status(plane: ControlPlane, name: str, status: dict[str, Any], manager: str) -> None:
    """As the operator and coordinators do: by server-side apply."""
    applied = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "status": status,
    }
    flags = ("--server-side", "--subresource=status", f"--field-manager={manager}")
    plane.kubectl("apply", *flags, "-f", "-", stdin=json.dumps(applied))


@pytest.fixture
def topology(plane: ControlPlane) -> Iterator[str]:
    """Of the older CRD, in a cluster without an operator."""
    install_older(plane)
    manifest = copy.deepcopy(good_manifest())
    manifest["metadata"]["name"] = "t"
    plane.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    yield "t"
    plane.kubectl("delete", "topo", "t")


def test_one_undeclared_field_fails_the_whole_status(plane: ControlPlane, topology: str) -> None:
    """kubernetes/kubernetes#139253: with 500 instead of 400."""
    status = {"phase": "Running", "redundancy": "1/2"}
    with pytest.raises(KubectlError, match=r"\.status\.redundancy: field not declared in schema"):
        apply_status(plane, topology, status, names.OPERATOR_FIELD_MANAGER)
    assert "phase" not in _status(plane, topology)


def test_the_report_of_a_newer_coordinator_is_kept(plane: ControlPlane, topology: str) -> None:
    report = {"fence": 1, **FIELDS_OF_A_NEWER_COORDINATOR}
    apply_status(plane, topology, {"dataPlane": report}, names.COORDINATOR_FIELD_MANAGER)
    assert _status(plane, topology)["dataPlane"] == report


def test_each_service_account_may_read_the_served_schema(plane: ControlPlane) -> None:
    user = "--as=system:serviceaccount:default:default"
    served = plane.kubectl("get", "--raw", f"/openapi/v3/apis/{names.API_VERSION}", user)
    assert names.KIND in served


def _status(plane: ControlPlane, name: str) -> dict[str, Any]:
    found = json.loads(plane.kubectl("get", "topo", name, "-o", "json"))
    return dict(found.get("status") or {})


def test_an_operator_works_with_an_older_crd_until_it_is_upgraded(
    plane: ControlPlane, kubeconfig: Path, world: World, tmp_path: Path
) -> None:
    install_older(plane)
    world.add_volume("rekindle", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    operator = OperatorProcess(kubeconfig, tmp_path, "first", {"PYTHONPATH": str(tmp_path)})
    try:
        wait_for("the operator to lead", operator.leads, START_S)
        world.create(yaml.safe_load((ROOT / "examples/flights/topology.yaml").read_text()))

        # It says what is missing, starts the topology and recovers it.
        wait_for("the topology runs", lambda: _is_running(world), START_S)
        assert _missing(operator) == len(MISSING)
        (line,) = _errors(operator)
        assert ", ".join(MISSING) in line["message"]
        assert f"kubectl {' '.join(UPGRADE)} charts/rekindle/crds/" in line["message"]
        valid = world.condition("flights", "Valid")
        assert valid["status"] == "True"
        assert ", ".join(MISSING) in valid["message"]
        assert world.condition("flights", "Degraded")["status"] == "False"
        before = _incarnations(world)
        world.core.delete_namespaced_pod(next(iter(world.pods("flights"))), world.namespace)
        wait_for("a new incarnation", lambda: _incarnations(world) > before)
        assert "redundancy" not in world.status("flights")

        # The documented command ends it.
        plane.kubectl(*UPGRADE, str(CRD))
        wait_for("all fields", lambda: _missing(operator) == 0)
        wait_for("redundancy", lambda: world.status("flights").get("redundancy") == "8/8")
        wait_for("the message", lambda: "CRD" not in world.condition("flights", "Valid")["message"])

        # A CRD that becomes older while the operator runs is noticed by the first refusal.
        install_older(plane)
        before = _incarnations(world)
        world.core.delete_namespaced_pod(next(iter(world.pods("flights"))), world.namespace)
        wait_for("a newer incarnation", lambda: _incarnations(world) > before, NOTICED_S)
        assert _missing(operator) == len(MISSING)
        install_crds(plane)
    finally:
        operator.stop()
    assert operator.unexpected_lines() == [], operator.log.read_text()


def _is_running(world: World) -> bool:
    return world.status("flights").get("phase") == "Running"


def _incarnations(world: World) -> int:
    """The sum over the slots of `status`."""
    return sum(s["incarnation"] for s in world.status("flights")["slots"])


def _missing(operator: OperatorProcess) -> float:
    metric = "rekindle_operator_crd_missing_fields "
    lines = operator.get("/metrics").splitlines()
    return next(float(x.removeprefix(metric)) for x in lines if x.startswith(metric))


def _errors(operator: OperatorProcess) -> list[dict[str, Any]]:
    lines = [json.loads(x) for x in operator.log.read_text().splitlines() if x.startswith("{")]
    return [x for x in lines if x.get("level", "").upper() == "ERROR"]
