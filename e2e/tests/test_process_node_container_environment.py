"""The environment of a container on a process node: variables, volumes, tokens, addresses."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.embedded.pods import Pods, container_status_of
from rekindle_testing.embedded.process_node.network_partition import cgroup2_mount
from rekindle_testing.embedded.process_node.node import QUICK, ImageReplacement, ProcessNode
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.platform("embedded")]

CORE = "/api/v1/namespaces/default"


def can_restrict_bind() -> bool:
    return cgroup2_mount() is not None and os.geteuid() == 0


@pytest.fixture(scope="module")
def node(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessNode]:
    images = {
        "machine": ImageReplacement(
            path=("/opt/first",), env={"FLAVOUR": "plain"}, workdir="/work/dir"
        )
    }
    directory = tmp_path_factory.mktemp("node") / "configured"
    node = ProcessNode("configured", control_plane, directory, images=images, timing=QUICK)
    node.start()
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


@pytest.fixture
def objects(pods: Pods) -> Iterator[Pods]:
    """A ConfigMap and a Secret named `given`."""
    meta = {"name": "given"}
    pods.api.call("POST", f"{CORE}/configmaps", {"metadata": meta, "data": {"MODE": "fast"}})
    secret = {"password": base64.b64encode(b"s3cret").decode()}
    pods.api.call("POST", f"{CORE}/secrets", {"metadata": meta, "data": secret})
    yield pods
    for kind in ("configmaps", "secrets"):
        pods.api.call("DELETE", f"{CORE}/{kind}/given")


def on(node: ProcessNode, script: str, **more: Any) -> dict[str, Any]:
    """The spec of a pod on this node. `more`: fields of the pod or of its container."""
    fields = ("volumes", "restartPolicy", "initContainers", "automountServiceAccountToken")
    pod = {field: more.pop(field) for field in fields if field in more}
    main = {"name": "main", "image": "machine", "command": ["sh", "-c", script], **more}
    return {
        "nodeName": node.name,
        "terminationGracePeriodSeconds": 1,
        "restartPolicy": "Never",
        "containers": [main],
        **pod,
    }


def output(pods: Pods, name: str) -> str:
    pods.wait_phase(name, "Succeeded")
    return pods.logs(name)


def python(script: str) -> str:
    return f"exec {sys.executable} -S -c '{script}'"


def test_variables_come_from_all_sources(node: ProcessNode, objects: Pods) -> None:
    def field(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    spec = on(
        node,
        "env; pwd; hostname; getent hosts $(hostname)",
        envFrom=[{"configMapRef": {"name": "given"}}, {"secretRef": {"name": "given"}}],
        env=[
            field("IP", "status.podIP"),
            field("HOST_IP", "status.hostIP"),
            {"name": "URL", "value": "http://$(IP)/$(MODE)"},
            {
                "name": "CORES",
                "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}},
            },
        ],
        resources={"limits": {"cpu": "250m"}},
    )
    objects.create("variables", spec)
    lines = output(objects, "variables").splitlines()
    ip = objects.get("variables")["status"]["podIP"]
    assert f"URL=http://{ip}/fast" in lines
    assert f"HOST_IP={node.address}" in lines
    assert "password=s3cret" in lines
    assert "CORES=250" in lines
    assert "FLAVOUR=plain" in lines
    assert any(line.startswith("PATH=/opt/first:") for line in lines)
    assert lines[-3:-1] == ["/work/dir", "variables"]
    assert lines[-1].split() == [ip, "variables"]


def test_the_control_plane_has_processors_first(node: ProcessNode, pods: Pods) -> None:
    pods.create("yields", on(node, "nice; cat /proc/self/autogroup || true"))
    nice, *group = output(pods, "yields").splitlines()
    assert nice == "10"
    if Path("/proc/self/autogroup").exists():
        assert group[0].endswith("nice 10")


def test_pods_have_their_own_addresses_in_the_nodes_range(node: ProcessNode, pods: Pods) -> None:
    for name in ("one", "two"):
        pods.create(name, on(node, "sleep 600"))
    addresses = {pods.wait_ready(name)["status"]["podIP"] for name in ("one", "two")}
    assert len(addresses) == 2
    assert {ip.split(".")[:2] == node.address.split(".")[:2] for ip in addresses} == {True}


@pytest.mark.skipif(not can_restrict_bind(), reason="needs root, cgroup v2 and bpf()")
def test_pods_that_bind_to_every_address_do_not_conflict(node: ProcessNode, pods: Pods) -> None:
    script = python(
        """
import socket, time
for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    s = socket.create_server((any_address, 9090 + (family == socket.AF_INET6)), family=family,
                             dualstack_ipv6=family == socket.AF_INET6)
    print(s.getsockname()[0].removeprefix("::ffff:"), flush=True)
time.sleep(600)
"""
    )
    for name in ("left", "right"):
        pods.create(name, on(node, script))
    for name in ("left", "right"):
        ip = pods.wait_ready(name)["status"]["podIP"]
        wait_for("both servers listen", lambda: len(pods.logs(name).split()) == 2)  # noqa: B023
        assert pods.logs(name).split() == [ip, ip]


def test_the_api_server_is_reached_with_the_pod_s_own_token(node: ProcessNode, pods: Pods) -> None:
    script = python(
        """
import json, os, ssl, urllib.request as r
d = "/var/run/secrets/kubernetes.io/serviceaccount/"
token = open(d + "token").read()
host = os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
q = r.Request(f"https://{host}/apis/authentication.k8s.io/v1/selfsubjectreviews",
    data=json.dumps(body).encode(),
    headers={"Authorization": "Bearer " + token, "Content-Type": "application/json"})
answer = r.urlopen(q, context=ssl.create_default_context(cafile=d + "ca.crt"))
print(json.dumps(json.load(answer)["status"]["userInfo"]), open(d + "namespace").read())
"""
    )
    pods.create("caller", on(node, script))
    text = output(pods, "caller")
    user, namespace = text.rsplit(maxsplit=1)
    assert namespace == "default"
    caller = json.loads(user)
    assert caller["username"] == "system:serviceaccount:default:default"
    assert caller["extra"]["authentication.kubernetes.io/pod-name"] == ["caller"]
    assert caller["extra"]["authentication.kubernetes.io/node-name"] == [node.name]


def test_no_token_is_mounted_if_not_requested(node: ProcessNode, pods: Pods) -> None:
    spec = on(node, "ls -A /var/run/secrets 2>&1 || true", automountServiceAccountToken=False)
    pods.create("anonymous", spec)
    assert "kubernetes.io" not in output(pods, "anonymous")


def test_volumes_of_every_kind(node: ProcessNode, objects: Pods, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    volumes: dict[str, Any] = {
        "conf": {"configMap": {"name": "given"}},
        "secret": {"secret": {"secretName": "given", "defaultMode": 0o400}},
        "self": {
            "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}
        },
        "disk": {"emptyDir": {"sizeLimit": "10Mi"}},
        "memory": {"emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
        "host": {"hostPath": {"path": str(tmp_path / "shared"), "type": "Directory"}},
    }
    mounts = [{"name": name, "mountPath": f"/v/{name}"} for name in volumes]
    mounts.append({"name": "disk", "mountPath": "/v/part", "subPath": "a/b"})
    script = (
        "cat /v/conf/MODE /v/secret/password /v/self/name; echo; stat -Lc %a /v/secret/password; "
        "touch /v/conf/x 2>&1; echo one > /v/part/file; cat /v/disk/a/b/file; "
        "df --output=fstype,size /v/memory | tail -1; echo out > /v/host/result; echo x > /v/gone"
    )
    declared = [{"name": name, **volume} for name, volume in volumes.items()]
    objects.create("volumes", on(node, script, volumes=declared, volumeMounts=mounts))
    lines = output(objects, "volumes").splitlines()
    assert lines[0] == "fasts3cretvolumes"
    assert lines[1] == "400"
    assert "Read-only file system" in lines[2]
    assert lines[3] == "one"
    assert lines[4].split() == ["tmpfs", "4096"]
    assert (tmp_path / "shared" / "result").read_text() == "out\n"
    assert not Path("/v").exists()


def test_a_claim_on_a_directory_of_the_machine(
    node: ProcessNode, pods: Pods, tmp_path: Path
) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "store"}
    volume = {
        "metadata": {"name": "store"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": str(tmp_path)},
        },
    }
    claim = {
        "metadata": {"name": "store"},
        "spec": {**spec, "resources": {"requests": {"storage": "1Gi"}}},
    }
    pods.api.call("POST", "/api/v1/persistentvolumes", volume)
    pods.api.call("POST", f"{CORE}/persistentvolumeclaims", claim)
    declared = [{"name": "s", "persistentVolumeClaim": {"claimName": "store"}}]
    mounts = [{"name": "s", "mountPath": "/store"}]
    pods.create("writer", on(node, "touch /store/mark", volumes=declared, volumeMounts=mounts))
    pods.wait_phase("writer", "Succeeded")
    assert (tmp_path / "mark").exists()
    pods.clear()
    pods.api.call("DELETE", f"{CORE}/persistentvolumeclaims/store")
    pods.api.call("DELETE", "/api/v1/persistentvolumes/store")


def test_a_missing_config_map_is_awaited_and_updates_arrive(node: ProcessNode, pods: Pods) -> None:
    script = "until grep -q new /c/key; do sleep 0.1; done; cat /c/key"
    declared = [{"name": "c", "configMap": {"name": "late"}}]
    mounts = [{"name": "c", "mountPath": "/c"}]
    pods.create("patient", on(node, script, volumes=declared, volumeMounts=mounts))
    wait_for("an Event names the volume", lambda: "FailedMount" in pods.events("patient"))
    assert "'late' not found" in pods.events("patient")["FailedMount"]
    pod = pods.wait("patient", "has a status", lambda p: "containerStatuses" in p["status"])
    assert pod["status"]["phase"] == "Pending"
    config = {"metadata": {"name": "late"}, "data": {"key": "old"}}
    pods.api.call("POST", f"{CORE}/configmaps", config)
    pods.wait_ready("patient")
    pods.api.call("PATCH", f"{CORE}/configmaps/late", {"data": {"key": "new"}})
    assert output(pods, "patient") == "new"
    pods.api.call("DELETE", f"{CORE}/configmaps/late")


def test_a_missing_key_of_a_variable_is_a_config_error(node: ProcessNode, objects: Pods) -> None:
    value_from = {"secretKeyRef": {"name": "given", "key": "nothing"}}
    objects.create("keyless", on(node, "true", env=[{"name": "A", "valueFrom": value_from}]))

    def is_waiting(pod: dict[str, Any]) -> bool:
        waiting = container_status_of(pod)["state"].get("waiting", {})
        return bool(waiting.get("reason") == "CreateContainerConfigError")

    pod = objects.wait("keyless", "waits", is_waiting)
    assert "has no key 'nothing'" in container_status_of(pod)["state"]["waiting"]["message"]


def test_an_empty_dir_above_its_limit_evicts_the_pod(node: ProcessNode, pods: Pods) -> None:
    declared = [{"name": "d", "emptyDir": {"sizeLimit": "1Mi"}}]
    script = "head -c 3000000 /dev/zero > /d/big; sleep 600"
    mounts = [{"name": "d", "mountPath": "/d"}]
    pods.create("hoarder", on(node, script, volumes=declared, volumeMounts=mounts))
    pod = pods.wait_phase("hoarder", "Failed")
    assert pod["status"]["reason"] == "Evicted"
    assert 'volume "d" exceeds the limit "1Mi"' in pod["status"]["message"]


def test_a_restarted_container_keeps_volumes_but_not_its_root(
    node: ProcessNode, pods: Pods
) -> None:
    script = (
        "ls /mark /v/mark 2>/dev/null; touch /mark; [ -e /v/mark ] || { touch /v/mark; exit 1; }"
    )
    spec = on(
        node,
        script,
        restartPolicy="OnFailure",
        volumes=[{"name": "v", "emptyDir": {}}],
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
    )
    pods.create("again", spec)
    assert output(pods, "again") == "/v/mark\n"
