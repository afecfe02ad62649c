"""What ServiceAccounts may do, and that pods comply with the Pod Security Standard `restricted`.

The API server is real, and so is the operator, with the rights of its own ServiceAccount. It
creates the pods of a topology in a namespace that enforces `restricted`. The namespace of the
release enforces it too. No pod runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, VALUE_SETS, objects
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from rekindle import names
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.embedded.process_node.node_admin import ApiRefusal, JsonApi
from rekindle_testing.embedded.toolchain import ensure_helm
from rekindle_testing.fixtures.bad_manifests import good_manifest
from rekindle_testing.harness.operator_process import OperatorProcess
from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.api

SYSTEM, TEAM = "rekindle-system", "team-secure"
ALONE = "team-alone"  # with its own release
_TOPOLOGIES = f"/apis/{names.API_VERSION}/namespaces/{TEAM}/{names.PLURAL}"
PERMISSIONS = Path(__file__).with_name("permissions.yaml")
_WRITE = "WRITE_PERMISSIONS"
_HOW = f"if they are meant: {_WRITE}=1 .venv/bin/python -m pytest {__file__} -k permissions"
_START_S = 60.0
_ACCOUNTS = {  # by name in the file: namespace, account
    "operator": (SYSTEM, "rekindle"),
    "operator with watchNamespace": (ALONE, "rekindle"),
    "watchdog": (SYSTEM, "rekindle-watchdog"),
    "coordinator": (TEAM, "good-coordinator"),
    "task": (TEAM, "default"),
}


@pytest.fixture(scope="module")
def api(api_server: ControlPlane) -> JsonApi:
    return JsonApi(api_server.kubeconfig)


@pytest.fixture(scope="module")
def plane(api_server: ControlPlane, api: JsonApi) -> Iterator[ControlPlane]:
    """With a release for all namespaces, one for a single namespace, and a node without kubelet,
    so that the DaemonSet has a pod."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    for namespace in (SYSTEM, TEAM, ALONE):
        metadata = {"name": namespace, "labels": labels}
        api.call("POST", "/api/v1/namespaces", {"metadata": metadata})
    api.call("POST", "/api/v1/nodes", {"metadata": {"name": "node-1"}})
    _helm(api_server, "install", SYSTEM, str(CHART))
    _helm(api_server, "install", ALONE, str(CHART), "--set", f"watchNamespace={ALONE}")
    yield api_server
    for namespace in (SYSTEM, ALONE):
        _helm(api_server, "uninstall", namespace)
    api.call("DELETE", "/api/v1/nodes/node-1")
    for namespace in (SYSTEM, TEAM, ALONE):
        api.call("DELETE", f"/api/v1/namespaces/{namespace}")


def _helm(plane: ControlPlane, verb: str, namespace: str, *more: str) -> None:
    command = [str(ensure_helm()), verb, "rekindle", *more, "--namespace", namespace]
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    subprocess.run(command, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def topology(
    plane: ControlPlane, api: JsonApi, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A topology that the operator has accepted, with all its pods."""
    account = plane.user_kubeconfig(f"system:serviceaccount:{SYSTEM}:rekindle")
    settings = {
        "REKINDLE_OPERATOR_NAMESPACE": SYSTEM,
        "REKINDLE_LEASE_NAME": "rekindle-operator",
        "REKINDLE_PRIORITY_CLASS": f"{SYSTEM}.rekindle-task",
    }
    directory = tmp_path_factory.mktemp("operator")
    operator = OperatorProcess(account, directory, "operator", settings)
    try:
        wait_for("the operator to lead", operator.leads, _START_S)
        api.call("POST", _TOPOLOGIES, good_manifest())
        yield wait_for("it starts", lambda: _if_started(api))
    finally:
        operator.stop()
    assert operator.unexpected_lines() == [], operator.log.read_text()


def _pods(api: JsonApi, namespace: str) -> list[dict[str, Any]]:
    return list(api.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"])


def _if_started(api: JsonApi) -> dict[str, Any] | None:
    found = api.call("GET", f"{_TOPOLOGIES}/good")
    slots = found.get("status", {}).get("slots") or ()
    return found if slots and len(_pods(api, TEAM)) == len(slots) else None


def _condition(topology: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(c for c in topology["status"]["conditions"] if c["type"] == kind)


# --- rights -------------------------------------------------------------------


def test_permissions_are_those_that_are_listed(plane: ControlPlane, topology: Any) -> None:
    """In the namespaces of the release, of topologies, and of others."""
    anyone = _as(plane, ("default", "without-rights"))
    found: dict[str, dict[str, list[str]]] = {}
    for what, (namespace, account) in _ACCOUNTS.items():
        places = {"its own namespace": namespace, TEAM: TEAM, SYSTEM: SYSTEM, "others": "default"}
        if namespace in (TEAM, SYSTEM):
            del places[namespace]
        user = _as(plane, (namespace, account))
        found[what] = {
            place: sorted(_may(user, where) - _may(anyone, where))
            for place, where in places.items()
        }
    if os.environ.get(_WRITE):
        head = (
            f"# Rights beyond those of every ServiceAccount. Written by `{_WRITE}=1`: see {{}}.\n"
        )
        text = yaml.safe_dump(found, sort_keys=False, width=100)
        PERMISSIONS.write_text(head.format(Path(__file__).name) + text)
    assert found == yaml.safe_load(PERMISSIONS.read_text()), _HOW


def _as(plane: ControlPlane, account: tuple[str, str]) -> Any:
    """A client that the API server takes for the ServiceAccount, given as namespace and name."""
    api: Any = config.new_client_from_config(str(plane.kubeconfig))  # type: ignore[no-untyped-call]  # the client has no types for it
    api.set_default_header("Impersonate-User", f"system:serviceaccount:{account[0]}:{account[1]}")
    return api


def _may(api: Any, namespace: str) -> set[str]:
    """As `kubectl auth can-i --list` has it, a line for each resource."""
    review: Any = {"spec": {"namespace": namespace}}
    create = client.AuthorizationV1Api(api).create_self_subject_rules_review
    answer: Any = create(review, _preload_content=False)
    status = json.loads(answer.data)["status"]
    assert not status["incomplete"]
    verbs: dict[str, set[str]] = {}
    for rule in status["resourceRules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                what = f"{resource}.{group}".rstrip(".")
                if chosen := rule.get("resourceNames"):
                    what += f" ({', '.join(sorted(chosen))})"
                verbs.setdefault(what, set()).update(rule["verbs"])
    for rule in status["nonResourceRules"]:
        for url in rule["nonResourceURLs"]:
            verbs.setdefault(url, set()).update(rule["verbs"])
    return {f"{what}: {' '.join(sorted(given))}" for what, given in verbs.items()}


def test_the_operator_cannot_grant_more_than_it_has(plane: ControlPlane, topology: Any) -> None:
    """It may create Roles; the API server refuses those with rights that it lacks."""
    role: Any = {
        "metadata": {"name": "more"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["delete"]}],
    }
    operator = client.RbacAuthorizationV1Api(_as(plane, _ACCOUNTS["operator"]))
    with pytest.raises(ApiException, match="attempting to grant RBAC permissions"):
        operator.create_namespaced_role(TEAM, role)


def test_tasks_get_no_token(api: JsonApi, topology: Any) -> None:
    pods = [p for p in _pods(api, TEAM) if p["metadata"]["labels"][names.LABEL_ROLE] == "task"]
    assert pods
    for pod in pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not any("projected" in volume for volume in pod["spec"]["volumes"])


# --- pod security -------------------------------------------------------------


def test_the_namespace_refuses_a_pod_that_is_not_restricted(
    plane: ControlPlane, api: JsonApi
) -> None:
    """Otherwise the tests below would show nothing."""
    spec = {"containers": [{"name": "plain", "image": "busybox"}]}
    pod = {"metadata": {"name": "plain"}, "spec": spec}
    with pytest.raises(ApiRefusal, match='violates PodSecurity "restricted'):
        api.call("POST", f"/api/v1/namespaces/{TEAM}/pods", pod)


def test_all_pods_of_a_topology_are_admitted(api: JsonApi, topology: Any) -> None:
    roles = {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in _pods(api, TEAM)}
    assert roles == {"task", "coordinator"}
    assert _condition(topology, "Valid")["status"] == "True"
    assert _condition(topology, "Degraded")["status"] == "False"


def test_all_pods_of_the_chart_are_admitted(plane: ControlPlane, api: JsonApi) -> None:
    def pods(workload: str) -> list[str]:
        owners = [pod["metadata"]["ownerReferences"][0]["kind"] for pod in _pods(api, SYSTEM)]
        return [owner for owner in owners if owner == workload]

    wait_for("the operator's pods", lambda: len(pods("ReplicaSet")) == 3)
    wait_for("a watchdog", lambda: pods("DaemonSet"))


@pytest.mark.parametrize("values", VALUE_SETS)
def test_pods_are_admitted_with_any_values(plane: ControlPlane, api: JsonApi, values: str) -> None:
    workloads = [o for o in objects(values) if o["kind"] in ("Deployment", "DaemonSet")]
    assert workloads
    for workload in workloads:
        template = workload["spec"]["template"]
        spec = {k: v for k, v in template["spec"].items() if k != "priorityClassName"}
        spec["serviceAccountName"] = "default"
        metadata = {"name": "dry", "labels": template["metadata"]["labels"]}
        pod = {"metadata": metadata, "spec": spec}
        api.call("POST", f"/api/v1/namespaces/{SYSTEM}/pods?dryRun=All", pod)


def test_a_template_that_is_not_restricted_is_refused(api: JsonApi, topology: Any) -> None:
    """By the dry run, before any pod is created."""
    manifest = good_manifest()
    manifest["metadata"]["name"] = "loose"
    manifest["spec"]["podTemplate"] = {"spec": {"securityContext": {"runAsNonRoot": False}}}
    api.call("POST", _TOPOLOGIES, manifest)

    def refused() -> dict[str, Any] | None:
        found = api.call("GET", f"{_TOPOLOGIES}/loose")
        conditions = found.get("status", {}).get("conditions") or ()
        return next((c for c in conditions if (c["type"], c["status"]) == ("Valid", "False")), None)

    condition = wait_for("it is refused", refused)
    assert condition["reason"] == "PodRefused"
    assert condition["message"].startswith("spec.podTemplate")
    assert 'violates PodSecurity "restricted' in condition["message"]
    assert "runAsNonRoot" in condition["message"]
