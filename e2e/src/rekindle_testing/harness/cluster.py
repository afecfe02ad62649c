"""An embedded cluster with Rekindle installed: for the demo, failure tests and benchmarks.

It knows Kubernetes and how Rekindle is installed; it knows nothing about what is tested. All files
are below one directory, and `stop` ends all processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubernetes.client import V1Node

from rekindle_testing.embedded.components import ComponentSettings
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.fixtures.api_fields import name_of
from rekindle_testing.harness.any_cluster import RELEASE, Cluster
from rekindle_testing.harness.nodes import EmbeddedNode, NodeKind, NodeResources, ProcessNodes
from rekindle_testing.progress import OnProgress, no_progress

NAMESPACE = "default"
OPERATOR_NAMESPACE = "rekindle-system"


class EmbeddedCluster(Cluster):
    """A control plane, nodes, a shared volume, and Rekindle."""

    namespace = NAMESPACE
    operator_namespace = OPERATOR_NAMESPACE
    nodes: dict[str, EmbeddedNode]

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 5,
        node_kind: NodeKind | None = None,
        resources: NodeResources | None = None,
        settings: ComponentSettings | None = None,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        self.node_directory = directory / "nodes"
        self.node_kind = node_kind or ProcessNodes()
        self.nodes = {}
        self._node_count = nodes
        self._resources = resources or NodeResources()
        self._on_progress = on_progress
        self._dead: list[EmbeddedNode] = []  # those whose addresses must not be reused
        self._cleanup = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._settings = settings or ComponentSettings()

    # -- lifecycle ----------------------------------------------------------------------------

    def start(self) -> None:
        self.shared.mkdir(parents=True, exist_ok=True)
        self.node_kind.prepare_shared(self.shared)
        try:
            self._cleanup.callback(self.node_kind.stop)
            self.node_kind.start(self.directory, self._on_progress)
            settings = replace(self._settings, api_address=self.node_kind.api_address)
            self.control_plane = ControlPlane(self.directory / "control-plane", settings)
            self._on_progress("starting etcd, kube-apiserver, controller manager, scheduler")
            self._cleanup.callback(self.control_plane.stop)
            self.control_plane.start()
            self._connect()
            self._on_progress(f"starting {self._node_count} {self.node_kind.name} nodes")
            started = [self.launch_node() for _ in range(self._node_count)]
            for namespace in (NAMESPACE, OPERATOR_NAMESPACE):
                self.create_restricted_namespace(namespace)
            for node in started:
                node.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything, nodes first; after an error the rest is still stopped."""
        with self._cleanup as cleanup:
            for node in (*self._dead, *self.nodes.values()):
                cleanup.callback(node.stop)
            self._dead.clear()
            self.nodes.clear()

    def keep_logs(self, directory: Path) -> None:
        """Copy the logs of components, agents, and pods of running nodes."""
        logs = {f"control-plane/{p.name}": p for p in self.control_plane.log_directory.glob("*")}
        nodes = self.node_directory
        logs |= {f"nodes/{p.relative_to(nodes)}": p for p in self.node_kind.agent_logs(nodes)}
        for log in self.node_kind.pod_logs(nodes):
            with contextlib.suppress(OSError):  # it was deleted meanwhile, with its pod
                logs[f"pods/{self.node_kind.pod_of(log)}/{self.node_kind.name_of(log)}"] = log
        for name, log in logs.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(log, directory / name)

    def launch_node(self, resources: NodeResources | None = None) -> EmbeddedNode:
        """Start one more machine, with the cluster's resources or others; it joins by itself."""
        number = next(self._numbers)
        name = f"node-{number}"
        node = self.node_kind.make(
            name,
            self.control_plane,
            self.node_directory / name,
            zone=f"zone-{'abc'[number % 3]}",
            resources=resources or self._resources,
        )
        self.nodes[name] = node
        node.start()
        return node

    def add_node(self, resources: NodeResources | None = None) -> str:
        """Add a machine; returns its name once it is Ready."""
        node = self.launch_node(resources)
        node.wait_ready()
        return node.name

    def kill_nodes(self, names: list[str], *, never_reuse_addresses: bool = False) -> None:
        """SIGKILL every process of these nodes, all at once. A new node may get their addresses,
        unless they are kept until the cluster stops."""
        dying = [self.nodes.pop(name) for name in names]
        if never_reuse_addresses:
            self._dead += dying
        # In parallel, since each waits for the end of its processes.
        with ThreadPoolExecutor(max(len(dying), 1)) as pool:
            list(pool.map(lambda node: node.kill(never_reuse_address=never_reuse_addresses), dying))

    def delete_lost_nodes(self) -> None:
        """Delete the Node objects of machines that are gone, as a cloud's node controller does.
        While they stay, no rollout of a DaemonSet ends, and `helm --wait` fails."""
        found = {
            name.partition("/")[2] for name in self.kubectl("get", "nodes", "-o", "name").split()
        }
        if lost := sorted(found - self.nodes.keys()):
            self.kubectl("delete", "nodes", *lost)

    def restore(self) -> None:
        """For the next user: as many nodes as at the start, all Ready and schedulable, nothing of
        those that are gone, and every replica of the operator and its watchdog."""
        nodes = self.core_api.list_node().items
        ready = {name_of(node) for node in nodes if _is_ready(node)}
        self.kill_nodes([name for name in self.nodes if name not in ready])
        joining = [self.launch_node() for _ in range(self._node_count - len(self.nodes))]
        self.delete_lost_nodes()
        # The garbage collector of pods would take a minute.
        for pod in self.core_api.list_pod_for_all_namespaces().items:
            assert pod.spec is not None
            if pod.spec.node_name and pod.spec.node_name not in self.nodes:
                self.delete_pod(pod)
        for node in joining:
            node.wait_ready()
        self.kubectl("uncordon", *self.nodes)
        for owner in (f"deployment/{RELEASE}", f"daemonset/{RELEASE}-watchdog"):
            wait = ("rollout", "status", owner, "-n", self.operator_namespace)
            self.kubectl(*wait, "--timeout=90s", timeout_s=100)

    def kill_processes(self, pod: Any) -> None:
        for pid in self.processes(pod):
            os.kill(pid, signal.SIGKILL)

    def processes(self, pod: Any) -> list[int]:
        """Ids of Rekindle's processes in the pod; at least one."""
        node, address = pod.spec.node_name, pod.status.pod_ip
        found = pod_processes(self.nodes[node], address)
        assert found, f"no process of pod address {address} on {node}"
        return found

    # -- Rekindle -----------------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        return self.control_plane.kubeconfig

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        return self.control_plane.kubectl(*arguments, stdin=stdin, timeout_s=timeout_s)

    @property
    def images(self) -> tuple[str, str]:
        return self.node_kind.operator_image, self.node_kind.pipelines_image

    def upload(self, path: str) -> None:
        """The volume is `shared` itself."""

    def download(self, path: str) -> None:
        """The volume is `shared` itself."""

    def create_claim(
        self, name: str, directory: Path | None = None, *, local: bool = False
    ) -> None:
        """Create a claim over a directory of this machine, by default the shared one.
        `local`: a volume whose owner the kubelet changes for an fsGroup; else a hostPath."""
        self.create_host_path_claim(name, str(directory or self.shared), local=local)


def pod_processes(node: EmbeddedNode, address: str, program: bytes = b"rekindle") -> list[int]:
    """The processes on the node whose environment names this pod address, and whose command
    names the program."""
    needle = f"={address}\0".encode()
    return [pid for pid in node.pids if needle in _environment(pid) and program in _command(pid)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_ready(node: V1Node) -> bool:
    conditions = (node.status.conditions if node.status is not None else None) or ()
    return any(c.type == "Ready" and c.status == "True" for c in conditions)
