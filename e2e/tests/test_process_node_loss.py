"""Failures of process nodes, and recovery from them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from rekindle_operator import probe
from rekindle_operator.cluster.convert import node_view
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.embedded.pods import Pods, condition_status_of, container_status_of
from rekindle_testing.embedded.process_node.network_partition import cgroup2_mount
from rekindle_testing.embedded.process_node.node import QUICK, ImageReplacement, ProcessNode
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.platform("embedded")]

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"here")
    def log_message(self, *_): pass
http.server.HTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""
# Leaves its process group and its session, as PySpark's daemon leaves its group.
STRAY = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"

WAITS_FOR_A_FILE = """
import os, time
while not os.path.exists("/signs/end"): time.sleep(0.05)
raise SystemExit(7)
"""

# Each start adds a line to /signs/starts; the first one ends at a sign.
COUNTS_ITS_STARTS = """
import os, time
with open("/signs/starts", "a") as starts: starts.write("start\\n")
while not os.path.exists("/signs/end"): time.sleep(0.05)
os.unlink("/signs/end")
raise SystemExit(7)
"""


class NodeFactory(Protocol):
    def __call__(self, name: str = "", **options: Any) -> ProcessNode: ...


def on(node: ProcessNode, *scripts: str) -> dict[str, Any]:
    lines = [f"{shlex.quote(sys.executable)} -S -c {shlex.quote(s)} &" for s in scripts[1:]]
    main = f"exec {shlex.quote(sys.executable)} -S -c {shlex.quote(scripts[0])}"
    ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        "name": "main",
        "image": "machine",  # the files of this machine: `ImageReplacement`
        "command": ["sh", "-c", "\n".join([*lines, main])],
        "env": [ip],
        "readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "memory", "mountPath": "/memory"}],
    }
    return {
        "nodeName": node.name,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        # A mount in the node, which must not keep its directory from being deleted.
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
        # Long enough to see a pod on a silent node stay where it is.
        "tolerations": [{"operator": "Exists"}],
    }


def responds(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the pod responds; False if the connection is refused or times out."""
    connection = http.client.HTTPConnection(address, 8080, timeout=timeout_s)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read() == b"here"
    except OSError:
        return False
    finally:
        connection.close()


def kubelet_responds(node: ProcessNode, pods: Pods) -> bool:
    """As the operator probes (docs/decisions/0025-kubelets-as-signals.md)."""
    kubelet = node_view(pods.api.call("GET", f"/api/v1/nodes/{node.name}")).kubelet
    assert kubelet is not None
    return asyncio.run(probe.kubelet_responds(kubelet, probe.unverified_tls(), within_s=2.0))


def is_closed(held: socket.socket) -> bool:
    """By FIN, or by RST if bytes were unread: the peer has ended in both cases."""
    try:
        return held.recv(1) == b""
    except ConnectionResetError:
        return True


def ready(node: ProcessNode) -> str:
    return node.api.conditions().get("Ready", "")


@pytest.fixture
def serving(node_factory: NodeFactory, pods: Pods) -> Callable[[str], tuple[ProcessNode, str]]:
    """A node of its own with one pod that serves, and the pod's address."""

    def make(name: str) -> tuple[ProcessNode, str]:
        node = node_factory()
        pods.create(name, on(node, SERVER, STRAY))
        return node, pods.wait_ready(name)["status"]["podIP"]

    return make


def test_a_killed_node_loses_all_processes_at_once(
    serving: Callable[[str], tuple[ProcessNode, str]],
) -> None:
    node, address = serving("victim")
    pids = node.pids
    held = socket.create_connection((address, 8080), timeout=2)
    node.kill()
    assert is_closed(held)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (node.directory / "data").exists()
    assert node.log.exists()
    wait_for("the node to be Unknown", lambda: ready(node) == "Unknown", 20)


def test_killing_the_agents_process_group_kills_the_node(
    serving: Callable[[str], tuple[ProcessNode, str]],
) -> None:
    node, address = serving("grouped")
    assert node.agent_pid is not None
    os.killpg(os.getpgid(node.agent_pid), signal.SIGKILL)
    wait_for("no process is left", lambda: not node.pids, 2)
    assert not responds(address)
    wait_for("its disk to be deleted", lambda: not (node.directory / "data").exists(), 2)


def test_a_frozen_node_is_silent_and_resumes_after_thaw(
    serving: Callable[[str], tuple[ProcessNode, str]], pods: Pods
) -> None:
    node, address = serving("frozen")
    uid = pods.get("frozen")["metadata"]["uid"]
    assert kubelet_responds(node, pods)
    node.freeze()
    assert not kubelet_responds(node, pods)
    # The kernel accepts the connection, but there is no response.
    with socket.create_connection((address, 8080), timeout=1):
        assert not responds(address)
    wait_for("the node to be Unknown", lambda: ready(node) == "Unknown", 20)
    wait_for(
        "its pod is unready", lambda: condition_status_of(pods.get("frozen"), "Ready") == "False"
    )
    node.thaw()
    wait_for("the node to be Ready", lambda: ready(node) == "True")
    pod = pods.wait_ready("frozen")
    assert responds(address)
    assert kubelet_responds(node, pods)
    assert pod["metadata"]["uid"] == uid
    assert container_status_of(pod)["restartCount"] == 0


def test_a_thawed_zombie_stops_its_deleted_pods(
    serving: Callable[[str], tuple[ProcessNode, str]], pods: Pods
) -> None:
    node, address = serving("zombie")
    node.freeze()
    pods.delete("zombie", grace_s=0)
    assert not pods.exists("zombie")
    node.thaw()
    wait_for("the zombie's pod ends", lambda: not responds(address), 10)


@pytest.mark.skipif(cgroup2_mount() is None or os.geteuid() != 0, reason="needs root and cgroup v2")
def test_a_network_partition_drops_all_packets_until_it_ends(
    serving: Callable[[str], tuple[ProcessNode, str]], node_factory: NodeFactory, pods: Pods
) -> None:
    node, address = serving("apart")
    other = node_factory()
    pods.create("beside", on(other, SERVER))
    beside = pods.wait_ready("beside")["status"]["podIP"]
    held = http.client.HTTPConnection(address, 8080, timeout=1)
    held.connect()
    node.partition_network()
    held.sock.send(b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(TimeoutError):
        held.sock.recv(1)
    assert not responds(address)
    assert responds(beside)
    assert not kubelet_responds(node, pods)
    assert kubelet_responds(other, pods)
    wait_for("the node to be Unknown", lambda: ready(node) == "Unknown", 20)
    assert ready(other) == "True"
    # Within the node nothing changes: its probe still succeeds, so nothing restarts.
    node.heal_network()
    wait_for("the node to be Ready", lambda: ready(node) == "True", 20)
    pod = pods.wait_ready("apart")
    assert container_status_of(pod)["restartCount"] == 0
    assert responds(address)


def test_a_deleted_node_does_not_register_again(node_factory: NodeFactory, pods: Pods) -> None:
    node = node_factory()
    node.delete_node_object()
    quiet_until = time.monotonic() + 3
    while time.monotonic() < quiet_until:
        assert not node.api.exists()
        time.sleep(0.2)
    node.restart_agent()
    node.wait_ready()


def test_draining_evicts_and_cordons(
    serving: Callable[[str], tuple[ProcessNode, str]], pods: Pods
) -> None:
    node, _ = serving("evicted")
    node.drain(timeout_s=20)
    assert not pods.exists("evicted")
    assert pods.api.call("GET", f"/api/v1/nodes/{node.name}")["spec"]["unschedulable"] is True
    assert ready(node) == "True"


def test_a_restarted_agent_adopts_containers_and_reports_the_exits_that_it_missed(
    serving: Callable[[str], tuple[ProcessNode, str]], pods: Pods, tmp_path: Path
) -> None:
    node, address = serving("kept")
    before = container_status_of(pods.get("kept"))
    brief = on(node, WAITS_FOR_A_FILE)
    brief["containers"][0].pop("readinessProbe")
    brief["containers"][0]["volumeMounts"] = [{"name": "signs", "mountPath": "/signs"}]
    brief["volumes"] = [{"name": "signs", "hostPath": {"path": str(tmp_path)}}]
    pods.create("missed", {**brief, "restartPolicy": "Never"})
    pods.create("orphaned", on(node, SERVER))
    orphan = pods.wait_ready("orphaned")["status"]["podIP"]
    pods.wait_phase("missed", "Running")
    node.stop_agent()
    assert responds(address)
    pods.delete("orphaned", grace_s=0)
    assert responds(orphan)
    (tmp_path / "end").touch()
    wait_for("a container to end without an agent", lambda: len(exits(node)) == 1)
    node.start_agent()
    ended = container_status_of(pods.wait_phase("missed", "Failed"))["state"]["terminated"]
    assert ended["exitCode"] == 7
    wait_for("the orphan ends", lambda: not responds(orphan))
    after = container_status_of(pods.wait_ready("kept"))
    assert after["state"] == before["state"]
    assert after["containerID"] == before["containerID"]
    assert pods.logs("kept") == ""


def test_containers_are_restarted_without_the_api_server(tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    signs.mkdir()
    (signs / "starts").touch()

    def starts() -> int:
        return len((signs / "starts").read_text().splitlines())

    with ControlPlane(tmp_path / "control-plane") as own, contextlib.ExitStack() as ends:
        node = ProcessNode(
            "alone", own, tmp_path / "alone", images={"machine": ImageReplacement()}, timing=QUICK
        )
        ends.callback(node.stop)
        node.start()
        node.wait_ready()
        own.kubectl("create", "configmap", "given", "--from-literal=key=value")
        spec = on(node, COUNTS_ITS_STARTS)
        spec["volumes"] = [
            {"name": "signs", "hostPath": {"path": str(signs)}},
            {"name": "given", "configMap": {"name": "given"}},
        ]
        main = spec["containers"][0]
        main.pop("readinessProbe")
        main["livenessProbe"] = {
            "exec": {"command": ["test", "!", "-e", "/signs/sick"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        }
        main["volumeMounts"] = [
            {"name": v["name"], "mountPath": f"/{v['name']}"} for v in spec["volumes"]
        ]
        pods = Pods(own.kubeconfig)
        pods.create("busy", spec)
        pods.wait_ready("busy")
        wait_for("it started", lambda: starts() == 1)
        own.pause_api_server()
        (signs / "end").touch()
        wait_for("the crashed container to run again", lambda: starts() == 2)
        (signs / "sick").touch()
        wait_for("the container that is not alive to run again", lambda: starts() == 3)
        (signs / "sick").unlink()
        own.resume_api_server()
        pods.wait("busy", "was restarted", lambda p: container_status_of(p)["restartCount"] >= 2)


def exits(node: ProcessNode) -> list[Path]:
    return list((node.directory / "data").glob("pods/*/containers/*/*/exit.json"))


def test_a_dead_agent_is_restarted(node_factory: NodeFactory) -> None:
    node = node_factory()
    first = node.agent_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_for("another agent runs", lambda: node.agent_pid not in (None, first))
    node.wait_ready()


def test_a_node_ends_with_the_process_that_created_it(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    server = [str(path) for path in control_plane.issue_server_certificate("brief", ["127.0.0.1"])]
    facts = {
        "kubeconfig": str(control_plane.kubeconfig),
        "ca_file": str(control_plane.ca_file),
        "node": str(control_plane.node_kubeconfig("brief")),
        "server": server,
        "directory": str(tmp_path / "brief"),
    }
    script = f"""
        import json, sys, time
        from pathlib import Path
        from rekindle_testing.embedded.process_node.node import QUICK, ImageReplacement, ProcessNode
        facts = json.loads({json.dumps(json.dumps(facts))})
        class Cluster:
            kubeconfig, ca_file = Path(facts["kubeconfig"]), Path(facts["ca_file"])
            def node_kubeconfig(self, name): return Path(facts["node"])
            def issue_server_certificate(self, name, hosts): return tuple(facts["server"])
        node = ProcessNode("brief", Cluster(), Path(facts["directory"]))
        node.start(); node.wait_ready(); node.freeze()
        print(json.dumps(node.pids), flush=True)
        time.sleep(600)
    """
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
    )
    assert host.stdout is not None
    pids = json.loads(host.stdout.readline())
    assert len(pids) >= 2
    host.kill()
    host.wait()
    wait_for(
        "a frozen node ends with the process that created it",
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        5,
    )
    wait_for("its disk to be deleted", lambda: not (tmp_path / "brief/data").exists(), 5)
    control_plane.kubectl("delete", "node/brief")
