"""Pods on a process node behave as on a kubelet."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rekindle_operator.resources.common import container_security_context, pod_security_context
from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.pods import Pods, condition_status_of, container_status_of
from rekindle_testing.embedded.process_node.api import ApiClient
from rekindle_testing.embedded.process_node.node import QUICK, ImageReplacement, ProcessNode
from rekindle_testing.embedded.process_node.pod_object import PodObject
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.platform("embedded")]

SERVER = """
import http.server, os, pathlib, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if pathlib.Path(self.path).exists() else 503)
        self.end_headers()
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(0)))
print("listening", flush=True)
http.server.HTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@pytest.fixture(scope="module")
def node(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessNode]:
    directory = tmp_path_factory.mktemp("node") / "steady"
    images = {
        "machine": ImageReplacement(),
        "greeter": ImageReplacement(env={"WHO": "me"}, command=("sh", "-c")),
    }
    node = ProcessNode("steady", control_plane, directory, images=images, timing=QUICK)
    node.start()
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


def on(node: ProcessNode, script: str, **container: Any) -> dict[str, Any]:
    """The spec of a pod whose one container runs a shell script."""
    pod_fields = ("restartPolicy", "terminationGracePeriodSeconds", "initContainers", "volumes")
    more = {field: container.pop(field) for field in pod_fields if field in container}
    main = {"name": "main", "image": "machine", "command": ["sh", "-c", script], **container}
    return {"nodeName": node.name, "terminationGracePeriodSeconds": 5, "containers": [main], **more}


def serving(node: ProcessNode, before: str = "", **container: Any) -> dict[str, Any]:
    script = f"{before}\nexec {shlex.quote(sys.executable)} -S -c {shlex.quote(SERVER)}"
    return on(node, script, env=[POD_IP], **container)


def http(path: str, **more: Any) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": 8080}, "periodSeconds": 1, **more}


# --- the node ---------------------------------------------------------------


def test_a_node_registers_with_fields_for_the_scheduler(
    control_plane: ControlPlane, node: ProcessNode, pods: Pods
) -> None:
    seen = pods.api.call("GET", f"/api/v1/nodes/{node.name}")
    assert seen["metadata"]["labels"]["topology.kubernetes.io/zone"] == node.zone
    assert seen["status"]["allocatable"]["cpu"] == "2"
    assert {"type": "InternalIP", "address": node.address} in seen["status"]["addresses"]
    assert seen["status"]["nodeInfo"]["kubeletVersion"].startswith("v1.")
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    times: set[str] = set()

    def is_renewed() -> bool:
        """It is created shortly after the Node, as by a kubelet."""
        found = pods.api.call("GET", leases)["items"]
        times.update(x["spec"]["renewTime"] for x in found if x["metadata"]["name"] == node.name)
        return len(times) > 1

    wait_for("the lease is renewed", is_renewed)


def test_a_node_may_not_write_other_nodes(control_plane: ControlPlane, node: ProcessNode) -> None:
    own = control_plane.node_kubeconfig(node.name)
    with pytest.raises(KubectlError, match="only its own Node object"):
        control_plane.kubectl("label", "node/another", "a=b", kubeconfig=own)


# --- lifecycle -----------------------------------------------------------------


def test_a_pod_succeeds_with_its_exit_status(node: ProcessNode, pods: Pods) -> None:
    script = "echo out; echo done > /dev/termination-log"
    pods.create("once", on(node, script, restartPolicy="Never"))
    pod = pods.wait_phase("once", "Succeeded")
    ended = container_status_of(pod)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (0, "Completed", "done\n")
    assert condition_status_of(pod, "Ready") == "False"
    assert pod["status"]["hostIP"] == node.address
    assert pod["status"]["podIP"].startswith(node.address.removesuffix("0.1"))
    assert {"Scheduled", "Started"} & set(pods.events("once"))


def test_a_crash_is_restarted_with_back_off_and_reported(node: ProcessNode, pods: Pods) -> None:
    pods.create("crash", on(node, "echo attempt; exit 3"))
    pod = pods.wait(
        "crash", "restarted twice", lambda p: container_status_of(p)["restartCount"] >= 2
    )
    assert pod["status"]["phase"] == "Running"
    pods.wait(
        "crash",
        "backs off",
        lambda p: (
            container_status_of(p)["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
        ),
    )
    last = container_status_of(pods.get("crash"))["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (3, "Error")
    assert "BackOff" in pods.events("crash")
    assert pods.logs("crash", previous="true") == "attempt\n"


def test_on_failure_restarts_until_success(node: ProcessNode, pods: Pods) -> None:
    script = "[ -e /shared/x ] || { touch /shared/x; exit 1; }"
    volume = {"name": "shared", "emptyDir": {}}
    mount = {"name": "shared", "mountPath": "/shared"}
    spec = on(node, script, restartPolicy="OnFailure", volumes=[volume], volumeMounts=[mount])
    pods.create("retry", spec)
    assert container_status_of(pods.wait_phase("retry", "Succeeded"))["restartCount"] == 1


def test_init_containers_run_one_after_the_other_before_the_rest(
    node: ProcessNode, pods: Pods
) -> None:
    mount = {"name": "v", "mountPath": "/v"}
    init = [
        {
            "name": name,
            "image": "machine",
            "command": ["sh", "-c", f"echo {name} >> /v/order"],
            "volumeMounts": [mount],
        }
        for name in ("first", "second")
    ]
    volumes = [{"name": "v", "emptyDir": {}}]
    spec = on(node, "cat /v/order", initContainers=init, volumes=volumes, volumeMounts=[mount])
    pods.create("ordered", {**spec, "restartPolicy": "Never"})
    pods.wait_phase("ordered", "Succeeded")
    assert pods.logs("ordered", container="main") == "first\nsecond\n"


def test_a_missing_command_is_a_start_error(node: ProcessNode, pods: Pods) -> None:
    pods.create("typo", on(node, "", command=["/no/such/program"], restartPolicy="Never"))
    ended = container_status_of(pods.wait_phase("typo", "Failed"))["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "/no/such/program" in ended["message"]


def test_memory_above_the_limit_is_oom_killed(node: ProcessNode, pods: Pods) -> None:
    limits = {"limits": {"memory": "40Mi"}}
    hog = "import time; x = bytearray(b'x') * (80 << 20); time.sleep(60)"
    script = f'{sys.executable} -S -c "{hog}" & wait'
    pods.create("hog", on(node, script, resources=limits, restartPolicy="Never"))
    ended = container_status_of(pods.wait_phase("hog", "Failed"))["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


def test_processes_of_a_container_end_with_its_first_one(node: ProcessNode, pods: Pods) -> None:
    daemon = f"{sys.executable} -S -c 'import os, time; os.setsid(); time.sleep(600)' & sleep 0.3"
    before = len(node.pids)
    pods.create("leaky", on(node, daemon, restartPolicy="Never"))
    pods.wait_phase("leaky", "Succeeded")
    wait_for("the daemon ended with its container", lambda: len(node.pids) == before)


# --- refused ----------------------------------------------------------------


def test_a_pod_above_free_capacity_fails_with_out_of_cpu(node: ProcessNode, pods: Pods) -> None:
    pods.create("large", on(node, "true", resources={"requests": {"cpu": "3"}}))
    assert pods.wait_phase("large", "Failed")["status"]["reason"] == "OutOfcpu"
    wait_for("the Event", lambda: "OutOfcpu" in pods.events("large"))


def test_unsupported_fields_are_refused(node: ProcessNode, pods: Pods) -> None:
    pods.create("host", {**on(node, "true"), "hostNetwork": True})
    pod = pods.wait_phase("host", "Failed")
    assert pod["status"]["reason"] == "UnsupportedByProcessNode"
    assert "spec.hostNetwork" in pod["status"]["message"]
    wait_for("the Event", lambda: "UnsupportedByProcessNode" in pods.events("host"))


def test_a_secured_pod_gets_an_event_about_ignored_fields(node: ProcessNode, pods: Pods) -> None:
    secured = on(node, "sleep 600", securityContext=container_security_context())
    pods.create("secured", {**secured, "securityContext": pod_security_context()})
    pods.wait_ready("secured")
    wait_for("the Event", lambda: "FieldsIgnored" in pods.events("secured"))
    message = pods.events("secured")["FieldsIgnored"]
    assert "spec.securityContext.runAsNonRoot" in message
    assert "spec.containers[main].securityContext.capabilities.drop" in message
    assert "spec.volumes" not in message


def test_an_unknown_image_names_existing_ones(node: ProcessNode, pods: Pods) -> None:
    pods.create("stranger", on(node, "true", image="nginx"))

    def is_waiting(pod: dict[str, Any]) -> bool:
        waiting = container_status_of(pod)["state"].get("waiting", {})
        return waiting.get("reason") == "ImagePullBackOff" and "machine" in waiting["message"]

    pods.wait("stranger", "waits for its image", is_waiting)
    assert "greeter, machine" in pods.events("stranger")["Failed"]


# --- probes -----------------------------------------------------------------


def test_readiness_follows_its_http_probe(node: ProcessNode, pods: Pods, tmp_path: Path) -> None:
    spec = serving(
        node,
        readinessProbe=http("/flags/up", failureThreshold=1),
        volumes=[{"name": "flags", "hostPath": {"path": str(tmp_path)}}],
        volumeMounts=[{"name": "flags", "mountPath": "/flags"}],
    )
    pods.create("moody", spec)
    wait_for(
        "its probe fails", lambda: "statuscode: 503" in pods.events("moody").get("Unhealthy", "")
    )
    assert condition_status_of(pods.wait_phase("moody", "Running"), "Ready") == "False"
    (tmp_path / "up").touch()
    pods.wait_ready("moody")
    (tmp_path / "up").unlink()
    pods.wait("moody", "is unready again", lambda p: condition_status_of(p, "Ready") == "False")
    assert container_status_of(pods.get("moody"))["restartCount"] == 0


def test_a_liveness_probe_that_fails_restarts_the_container(node: ProcessNode, pods: Pods) -> None:
    probe = {"exec": {"command": ["test", "!", "-e", "/sick"]}, "periodSeconds": 1}
    script = "sleep 0.5; touch /sick; trap 'exit 0' TERM; while :; do sleep 0.1; done"
    pods.create("sick", on(node, script, livenessProbe={**probe, "failureThreshold": 1}))
    pod = pods.wait("sick", "was restarted", lambda p: container_status_of(p)["restartCount"] >= 1)
    assert container_status_of(pod)["lastState"]["terminated"]["reason"] == "Completed"
    assert "Liveness probe failed: command exited with 1" in pods.events("sick")["Unhealthy"]


def test_a_startup_probe_delays_the_other_probes(node: ProcessNode, pods: Pods) -> None:
    probe = {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1}
    spec = serving(
        node,
        "sleep 2",
        ports=[{"name": "web", "containerPort": 8080}],
        startupProbe={**probe, "failureThreshold": 20},
        livenessProbe={**probe, "failureThreshold": 1},
    )
    pods.create("slow", spec)
    assert container_status_of(pods.wait_phase("slow", "Running"))["started"] is False
    pod = pods.wait_ready("slow")
    assert container_status_of(pod)["started"] is True
    assert container_status_of(pod)["restartCount"] == 0


# --- termination ------------------------------------------------------------


def test_a_deleted_pod_gets_sigterm_first(node: ProcessNode, pods: Pods) -> None:
    spec = serving(node, readinessProbe=http("/"))
    pods.create("polite", spec)
    pods.wait_ready("polite")
    lines = pods.follow("polite")
    assert next(lines) == "listening"
    pods.delete("polite")
    assert list(lines) == ["bye"]
    pods.wait_gone("polite")


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(
    node: ProcessNode, pods: Pods
) -> None:
    before = len(node.pids)
    spec = on(node, "trap '' TERM; while :; do sleep 1; done", terminationGracePeriodSeconds=1)
    pods.create("no-sigterm", spec)
    pods.wait_ready("no-sigterm")
    deleted_at = time.monotonic()
    pods.delete("no-sigterm")
    pods.wait_gone("no-sigterm", within_s=5)
    assert time.monotonic() - deleted_at >= 1
    wait_for("its processes are gone", lambda: len(node.pids) == before)


def test_a_pod_whose_object_is_gone_is_killed(node: ProcessNode, pods: Pods) -> None:
    before = len(node.pids)
    pods.create("forced", on(node, "sleep 600"))
    pods.wait_ready("forced")
    pods.delete("forced", grace_s=0)
    wait_for("its processes are gone", lambda: len(node.pids) == before, 5)


def test_a_pod_whose_object_is_gone_uses_no_capacity(node: ProcessNode, pods: Pods) -> None:
    """As on a kubelet, while its processes still end: the plan and the scheduler see only
    objects."""
    most = {"requests": {"cpu": "1500m"}}
    pods.create("no-sigterm", on(node, "trap '' TERM; while :; do sleep 1; done", resources=most))
    pods.wait_ready("no-sigterm")
    pods.delete("no-sigterm", grace_s=0)
    pods.create("next", on(node, "sleep 600", resources=most))
    pod = pods.wait("next", "ran or was refused", lambda p: p["status"]["phase"] != "Pending")
    assert pod["status"]["phase"] == "Running", pod["status"]


def test_a_late_write_does_not_change_a_new_pod_of_that_name(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    # Pods that are bound to no node: only this test writes to them.
    spec = {"schedulerName": "nobody", "containers": [{"name": "main", "image": "machine"}]}
    first = pods.create("heir", spec)
    pods.delete("heir", grace_s=0)
    second = pods.create("heir", spec)
    kubeconfig = tmp_path / "admin.kubeconfig"
    kubeconfig.write_bytes(control_plane.kubeconfig.read_bytes())

    async def end(pod: dict[str, Any]) -> None:
        api = ApiClient(kubeconfig)
        try:
            seen = PodObject(api, pod)
            await seen.publish({"phase": "Failed", "conditions": []})
            await seen.delete()
        finally:
            await api.close()

    asyncio.run(end(first))
    after = pods.get("heir")
    assert after["metadata"]["uid"] == second["metadata"]["uid"]
    assert "deletionTimestamp" not in after["metadata"]
    assert after["status"]["phase"] == "Pending"
    asyncio.run(end(second))
    assert not pods.exists("heir")


# --- logs -------------------------------------------------------------------


def test_logs_follow_tail_and_previous(node: ProcessNode, pods: Pods) -> None:
    script = "for i in 1 2 3 4; do echo line $i; done; sleep 1; echo late; exit 1"
    pods.create("chatty", on(node, script, restartPolicy="Never"))
    pods.wait_phase("chatty", "Running")
    assert pods.logs("chatty", follow="true").endswith("line 4\nlate\n")
    assert pods.logs("chatty", tailLines=2) == "line 4\nlate\n"
    assert pods.logs("chatty", limitBytes=6) == "line 1"
    stamped = pods.logs("chatty", timestamps="true", tailLines=1)
    assert stamped.startswith("20")
    assert stamped.endswith("Z late\n")
    with pytest.raises(EmbeddedError, match="previous"):
        pods.logs("chatty", previous="true")


def test_kubectl_reads_logs_and_exec_is_refused(
    control_plane: ControlPlane, node: ProcessNode, pods: Pods
) -> None:
    pods.create("seen", on(node, "echo hello; sleep 600", terminationGracePeriodSeconds=0))
    pods.wait_ready("seen")
    wait_for("kubectl shows the log", lambda: control_plane.kubectl("logs", "seen") == "hello\n")
    with pytest.raises(KubectlError):
        control_plane.kubectl("exec", "seen", "--", "true")


def test_kubectl_reads_the_tail_the_previous_log_and_follows_to_the_end(
    control_plane: ControlPlane, node: ProcessNode, pods: Pods, tmp_path: Path
) -> None:
    def logs(*options: str) -> str:
        return control_plane.kubectl("logs", "twice", *options)

    # The first attempt writes a file and fails; the second ends when another file exists.
    script = """
    if ! [ -e /flags/failed ]; then touch /flags/failed; echo first; exit 1; fi
    echo second; echo waits
    while ! [ -e /flags/end ]; do sleep 0.05; done
    echo ends
    """
    spec = on(
        node,
        script,
        restartPolicy="OnFailure",
        volumes=[{"name": "flags", "hostPath": {"path": str(tmp_path)}}],
        volumeMounts=[{"name": "flags", "mountPath": "/flags"}],
    )
    pods.create("twice", spec)
    pods.wait("twice", "was restarted", lambda p: container_status_of(p)["restartCount"] == 1)
    wait_for("it runs again", lambda: logs() == "second\nwaits\n")
    assert logs("--tail=1") == "waits\n"
    assert logs("-p") == "first\n"
    with ThreadPoolExecutor(1) as follower:
        followed = follower.submit(logs, "-f")
        try:
            with pytest.raises(TimeoutError):
                followed.result(timeout=1)
        finally:
            (tmp_path / "end").touch()
        assert followed.result(timeout=15) == "second\nwaits\nends\n"
    pods.wait_phase("twice", "Succeeded")
