"""An embedded cluster with Rekindle installed: for the demo, failure tests and benchmarks.

It knows Kubernetes and how Rekindle is installed; it knows nothing about what is tested. All files
are below one directory, and `stop` ends all processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kubernetes import client, config

from rekindle import names
from rekindle_testing.embedded.components import Settings
from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.toolchain import ensure_helm
from rekindle_testing.harness.nodes import Node, NodeKind, NodeShape, ProcessNodes, Report
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

MOUNT = "/var/lib/rekindle"
NAMESPACE = "default"
SYSTEM = "rekindle-system"
OPERATOR_LEASE = "rekindle-operator"
POD_SECURITY = "pod-security.kubernetes.io/enforce"


class EmbeddedCluster:
    """A control plane, nodes, a shared volume, and Rekindle."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 5,
        kind: NodeKind | None = None,
        shape: NodeShape | None = None,
        settings: Settings | None = None,
        report: Report = lambda _: None,
    ) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        self.node_directory = directory / "nodes"
        self.kind = kind or ProcessNodes()
        self.nodes: dict[str, Node] = {}
        self._wanted = nodes
        self._shape = shape or NodeShape()
        self._report = report
        self._dead: list[Node] = []
        self._ends = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._settings = settings or Settings()

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # -- lifecycle ----------------------------------------------------------------------------

    def start(self) -> None:
        self.shared.mkdir(parents=True, exist_ok=True)
        self.kind.prepare_shared(self.shared)
        try:
            self._ends.callback(self.kind.stop)
            self.kind.start(self.directory, self._report)
            settings = replace(self._settings, api_address=self.kind.api_address)
            self.control_plane = ControlPlane(self.directory / "control-plane", settings)
            self._report("starting etcd, kube-apiserver, controller manager, scheduler")
            self._ends.callback(self.control_plane.stop)
            self.control_plane.start()
            kubeconfig = str(self.control_plane.kubeconfig)
            self._api_client = config.new_client_from_config(kubeconfig)  # type: ignore[no-untyped-call]
            self.core = client.CoreV1Api(self._api_client)
            self.custom = client.CustomObjectsApi(self._api_client)
            self.coordination = client.CoordinationV1Api(self._api_client)
            self._report(f"starting {self._wanted} {self.kind.name} nodes")
            started = [self.launch_node() for _ in range(self._wanted)]
            for namespace in (NAMESPACE, SYSTEM):
                self._make_restricted(namespace)
            for node in started:
                node.wait_ready()
        except BaseException:
            self.stop()
            raise

    def _make_restricted(self, namespace: str) -> None:
        """Pods that need more than the Pod Security Standard `restricted` are refused in it."""
        metadata = {"name": namespace, "labels": {POD_SECURITY: "restricted"}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def stop(self) -> None:
        """Stop everything, nodes first; after an error the rest is still stopped."""
        with self._ends as ends:
            for node in (*self._dead, *self.nodes.values()):
                ends.callback(node.stop)
            self._dead.clear()
            self.nodes.clear()

    def keep_logs(self, directory: Path) -> None:
        """Copy the logs of components, agents, and pods of running nodes."""
        logs = {f"control-plane/{p.name}": p for p in self.control_plane.log_directory.glob("*")}
        nodes = self.node_directory
        logs |= {f"nodes/{p.relative_to(nodes)}": p for p in self.kind.agent_logs(nodes)}
        for log in self.kind.pod_logs(nodes):
            with contextlib.suppress(OSError):  # it was deleted meanwhile, with its pod
                logs[f"pods/{self.kind.pod_of(log)}/{self.kind.name_of(log)}"] = log
        for name, log in logs.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(log, directory / name)

    def launch_node(self, shape: NodeShape | None = None) -> Node:
        """Start one more machine, of the cluster's own shape or another; it joins by itself."""
        number = next(self._numbers)
        name = f"node-{number}"
        node = self.kind.make(
            name,
            self.control_plane,
            self.node_directory / name,
            zone=f"zone-{'abc'[number % 3]}",
            shape=shape or self._shape,
        )
        self.nodes[name] = node
        node.start()
        return node

    def add_node(self, shape: NodeShape | None = None) -> str:
        """One more machine; returns its name once it is Ready."""
        node = self.launch_node(shape)
        node.wait_ready()
        return node.name

    def kill_nodes(self, names: list[str], *, keep_addresses: bool = False) -> None:
        """SIGKILL every process of these nodes, all at once. A new node may get their addresses,
        unless they are kept until the cluster stops."""
        dying = [self.nodes.pop(name) for name in names]
        if keep_addresses:
            self._dead += dying
        # In parallel, since each waits for the end of its processes.
        with ThreadPoolExecutor(max(len(dying), 1)) as pool:
            list(pool.map(lambda node: node.kill(keep_address=keep_addresses), dying))

    # -- Rekindle -----------------------------------------------------------------------------

    def install(self, timeout_s: float = 90) -> None:
        """`helm install` and wait for the operator's Deployment and the CRD."""
        chart = str(ROOT / "charts" / "rekindle")
        images = {"image": self.kind.operator_image, "pipelines.image": self.kind.pipelines_image}
        values = [value for name, image in images.items() for value in _image(name, image)]
        self._helm("install", chart, *values, timeout_s=timeout_s)

    def upgrade(self, chart: Path, operator_image: str, timeout_s: float = 90) -> None:
        """As docs/operations.md has it: first the CRDs of the chart, then the release."""
        self.control_plane.kubectl(
            *("apply", "--server-side", "--force-conflicts", "-f", str(chart / "crds"))
        )
        values = _image("image", operator_image)
        self._helm("upgrade", str(chart), "--reset-then-reuse-values", *values, timeout_s=timeout_s)

    def uninstall(self, timeout_s: float = 90) -> None:
        """`helm uninstall`; the CRD, which helm never deletes, stays."""
        self._helm("uninstall", timeout_s=timeout_s)

    def _helm(self, verb: str, *arguments: str, timeout_s: float) -> None:
        command = [
            *(str(ensure_helm(self._report)), verb, "rekindle", *arguments),
            *("--namespace", SYSTEM, "--wait", "--timeout", f"{timeout_s:.0f}s"),
        ]
        environment = {**os.environ, "KUBECONFIG": str(self.control_plane.kubeconfig)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            found = f"{self.describe_system()}\n{self._operator_logs()}"
            raise RuntimeError(f"helm {verb} failed:\n{done.stderr}\n{found}")

    def _operator_logs(self) -> str:
        arguments = ("logs", "-n", SYSTEM, "-l", names.LABEL_OPERATOR, "--tail=20", "--prefix")
        try:
            return self.control_plane.kubectl(*arguments)
        except KubectlError as error:  # no container has run yet
            return str(error)

    def describe_system(self) -> str:
        return self.control_plane.kubectl("get", "pods,events", "-A", "-o", "wide")

    def make_volume(self, name: str, directory: Path | None = None, *, local: bool = False) -> None:
        """A PersistentVolumeClaim over a directory of this machine, by default the shared one.
        `local`: a volume whose owner the kubelet changes for an fsGroup; else a hostPath."""
        path = {"path": str(directory or self.shared)}
        size: dict[str, Any] = {"storage": "10Gi"}
        everywhere = [{"key": "kubernetes.io/hostname", "operator": "Exists"}]
        affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": everywhere}]}}
        volume: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{name}-shared"},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "claimRef": {"namespace": NAMESPACE, "name": name},
                **({"local": path, "nodeAffinity": affinity} if local else {"hostPath": path}),
            },
        }
        claim: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": f"{name}-shared",
                "resources": {"requests": size},
            },
        }
        self.apply(volume, claim)
        # A pod that is placed before the claim is bound would wait for the scheduler's next try.
        wait_for(f"claim {name} to be bound", lambda: self._is_bound(name), 30)

    def _is_bound(self, claim: str) -> bool:
        found = self.core.read_namespaced_persistent_volume_claim(claim, NAMESPACE)
        return found.status is not None and found.status.phase == "Bound"

    def apply(self, *manifests: dict[str, Any]) -> None:
        """`kubectl apply` of the manifests."""
        bundle: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.control_plane.kubectl("apply", "-f", "-", stdin=json.dumps(bundle))

    def topology(self, name: str) -> dict[str, Any]:
        found = self.custom.get_namespaced_custom_object(
            names.GROUP, names.VERSION, NAMESPACE, names.PLURAL, name
        )
        return cast(dict[str, Any], found)

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.topology(name).get("status") or {})

    def pods(self, selector: str = "") -> list[Any]:
        return list(self.core.list_namespaced_pod(NAMESPACE, label_selector=selector).items)

    def tasks(self, topology: str) -> list[Any]:
        return self.pods(f"{names.LABEL_TOPOLOGY}={topology},{names.LABEL_ROLE}={names.ROLE_TASK}")

    def operator_pods(self) -> list[Any]:
        selector = names.LABEL_OPERATOR
        return list(self.core.list_namespaced_pod(SYSTEM, label_selector=selector).items)

    def leading_operator_pod(self) -> Any:
        """The replica of the operator that holds its Lease: only its loss has an effect."""
        return wait_for("an operator pod that leads", self._leading_operator_pod, 60)

    def _leading_operator_pod(self) -> Any:
        lease = self.coordination.read_namespaced_lease(OPERATOR_LEASE, SYSTEM)
        # The chart makes the pod's name its identity.
        holder = lease.spec and lease.spec.holder_identity
        return next((p for p in self.operator_pods() if p.metadata.name == holder), None)

    def delete_topology(self, name: str, timeout_s: float = 60) -> None:
        """Delete it, if it is still there, and wait until its pods are deleted."""
        self.control_plane.kubectl(
            *("delete", "topo", name, "-n", NAMESPACE, "--ignore-not-found", "--wait=false")
        )
        wait_for(
            f"the pods of {name} to be deleted",
            lambda: not self.pods(f"{names.LABEL_TOPOLOGY}={name}"),
            timeout_s,
        )


def _image(name: str, image: str) -> list[str]:
    """The chart's values for an image."""
    repository, _, tag = image.rpartition(":")
    return ["--set", f"{name}.repository={repository},{name}.tag={tag}"]
