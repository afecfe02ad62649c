"""Rekindle on a cluster of any kind: what failure scenarios use of it.

It knows kubectl, helm and the API; what a kind of cluster can do to its nodes, and where its volume
is, is up to the class of that kind. An operation that a kind does not have raises
`UnsupportedByCluster` before it changes anything.
"""

from __future__ import annotations

import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, cast

from kubernetes import client, config, watch

from rekindle import names
from rekindle_testing.embedded.control_plane import KubectlError
from rekindle_testing.embedded.toolchain import ensure_helm
from rekindle_testing.paths import ROOT
from rekindle_testing.progress import OnProgress
from rekindle_testing.waiting import wait_for

SHARED_MOUNT_PATH = "/var/lib/rekindle"  # in pods: of the volume that all nodes share
RELEASE = "rekindle"
OPERATOR_LEASE = f"{RELEASE}-operator"
POD_SECURITY = "pod-security.kubernetes.io/enforce"
CHART = ROOT / "charts" / "rekindle"


class UnsupportedByCluster(Exception):
    """This kind of cluster cannot do it; the message says why. Its tests are skipped."""


class ClusterNode(Protocol):
    """What scenarios do to a node of any cluster."""

    name: str

    def volume(self, pod_uid: str, name: str) -> Path:
        """Directory, on this machine, of a pod's emptyDir."""

    def freeze(self) -> None:
        """Stop all processes; connections stay open, and there are no responses."""

    def thaw(self) -> None:
        """Let them run again."""

    def partition_network(self) -> None: ...
    def heal_network(self) -> None: ...
    def drain(self, timeout_s: float = ...) -> None:
        """Cordon, and evict pods within the limits of disruption budgets."""


class Cluster(ABC):
    """`namespace` is that of topologies, `operator_namespace` that of the release. `shared` is
    the volume as this machine sees it: the volume itself, or a copy, which `upload` writes to the
    volume and `download` updates from it."""

    directory: Path
    shared: Path
    namespace: str
    operator_namespace: str
    nodes: Mapping[str, ClusterNode]
    core_api: client.CoreV1Api
    custom: client.CustomObjectsApi
    coordination: client.CoordinationV1Api
    _on_progress: OnProgress

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """After an error, the rest is still stopped or removed."""

    def _connect(self) -> None:
        kubeconfig = str(self.kubeconfig)
        api = config.new_client_from_config(kubeconfig)  # type: ignore[no-untyped-call]
        self.core_api = client.CoreV1Api(api)
        self.custom = client.CustomObjectsApi(api)
        self.coordination = client.CoordinationV1Api(api)

    # -- what differs -------------------------------------------------------------------------

    @property
    @abstractmethod
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator, with `namespace` as its default."""

    @abstractmethod
    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Run kubectl as an administrator, and return its output; raises KubectlError."""

    @property
    @abstractmethod
    def images(self) -> tuple[str, str]:
        """Of the operator, and of the pipelines (tasks and coordinators)."""

    @abstractmethod
    def create_claim(self, name: str) -> None:
        """Create a claim of this name over the shared volume."""

    @abstractmethod
    def add_node(self) -> str:
        """Add a machine, or restart a lost one; returns its name once it is Ready."""

    @abstractmethod
    def kill_nodes(self, names: list[str]) -> None:
        """End these machines, all at once; their connections are not closed."""

    @abstractmethod
    def kill_processes(self, pod: Any) -> None:
        """SIGKILL every process of Rekindle in a pod."""

    # -- the shared volume --------------------------------------------------------------------

    @abstractmethod
    def upload(self, path: str) -> None:
        """Write a file or folder of `shared` to the volume."""

    @abstractmethod
    def download(self, path: str) -> None:
        """Copy a folder of the volume to `shared`."""

    def move(self, path: str, to: str) -> None:
        """Rename a file or folder of the volume."""
        (self.shared / path).rename(self.shared / to)

    # -- nodes and pods -----------------------------------------------------------------------

    def uncordon(self, node: str) -> None:
        self.kubectl("uncordon", node)

    def delete_pod(self, pod: Any) -> None:
        """Without a grace period: the object is deleted at once, even if its containers run."""
        name, namespace = pod.metadata.name, pod.metadata.namespace
        how = ("--grace-period=0", "--force", "--wait=false")
        self.kubectl("delete", "pod", name, "-n", namespace, *how)

    # -- Rekindle -----------------------------------------------------------------------------

    def install(self, timeout_s: float = 90) -> None:
        """`helm install` and wait for the operator's Deployment and the CRD."""
        images = zip(("image", "pipelines.image"), self.images, strict=True)
        values = [value for name, image in images for value in image_values(name, image)]
        self.helm("install", str(CHART), *values, *self._install_options(), timeout_s=timeout_s)

    def _install_options(self) -> list[str]:
        return []

    def upgrade(self, chart: Path, operator_image: str, timeout_s: float = 90) -> None:
        """As in docs/operations.md: first the CRDs of the chart, then the release."""
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(chart / "crds"))
        values = image_values("image", operator_image)
        self.helm("upgrade", str(chart), "--reset-then-reuse-values", *values, timeout_s=timeout_s)

    def uninstall(self, timeout_s: float = 90) -> None:
        """`helm uninstall`; the CRD, which helm never deletes, stays."""
        self.helm("uninstall", timeout_s=timeout_s)

    def helm(self, verb: str, *arguments: str, timeout_s: float) -> None:
        command = [
            *(str(ensure_helm(self._on_progress)), verb, RELEASE, *arguments),
            *("--namespace", self.operator_namespace, "--wait", "--timeout", f"{timeout_s:.0f}s"),
        ]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            found = f"{self.describe_system()}\n{self._operator_logs()}"
            raise RuntimeError(f"helm {verb} failed:\n{done.stderr}\n{found}")

    def _operator_logs(self) -> str:
        arguments = (
            "logs",
            "-n",
            self.operator_namespace,
            "-l",
            names.LABEL_OPERATOR_DEPLOYMENT,
            "--tail=20",
            "--prefix",
        )
        try:
            return self.kubectl(*arguments)
        except KubectlError as error:  # no container has run yet
            return str(error)

    def describe_system(self) -> str:
        """Pods and Events of both namespaces."""
        namespaces = (self.namespace, self.operator_namespace)
        found = [self.kubectl("get", "pods,events", "-n", n, "-o", "wide") for n in namespaces]
        return "\n".join(found)

    def create_restricted_namespace(
        self, namespace: str, labels: Mapping[str, str] | None = None
    ) -> None:
        """Pods that need more than the Pod Security Standard `restricted` are refused in it."""
        metadata = {"name": namespace, "labels": {POD_SECURITY: "restricted", **(labels or {})}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    # -- objects ------------------------------------------------------------------------------

    def apply(self, *manifests: dict[str, Any]) -> None:
        """`kubectl apply` of the manifests."""
        bundle: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(bundle))

    def topology(self, name: str) -> dict[str, Any]:
        found = self.custom.get_namespaced_custom_object(
            names.GROUP, names.VERSION, self.namespace, names.PLURAL, name
        )
        return cast(dict[str, Any], found)

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.topology(name).get("status") or {})

    def pods(self, selector: str = "") -> list[Any]:
        return list(
            self.core_api.list_namespaced_pod(self.namespace, label_selector=selector).items
        )

    def watch_pod(self, name: str, timeout_s: int) -> Generator[Any, None, None]:
        """Yields the pod as it is when the watch begins and after each change, until its deletion,
        which is the last one."""
        events = watch.Watch().stream(  # type: ignore[no-untyped-call]
            self.core_api.list_namespaced_pod,
            self.namespace,
            field_selector=f"metadata.name={name}",
            timeout_seconds=timeout_s,
        )
        for event in events:
            yield event["object"]
            if event["type"] == "DELETED":
                return

    def tasks(self, topology: str) -> list[Any]:
        return self.pods(f"{names.LABEL_TOPOLOGY}={topology},{names.LABEL_ROLE}={names.ROLE_TASK}")

    def operator_pods(self) -> list[Any]:
        selector = names.LABEL_OPERATOR_DEPLOYMENT
        pods = self.core_api.list_namespaced_pod(self.operator_namespace, label_selector=selector)
        return list(pods.items)

    def leading_operator_pod(self) -> Any:
        """The replica of the operator that holds its Lease: only its loss has an effect."""
        return wait_for("an operator pod that leads", self._leading_operator_pod, 60)

    def _leading_operator_pod(self) -> Any:
        lease = self.coordination.read_namespaced_lease(OPERATOR_LEASE, self.operator_namespace)
        # The chart makes the pod's name the holder identity of the Lease.
        holder = lease.spec and lease.spec.holder_identity
        return next((p for p in self.operator_pods() if p.metadata.name == holder), None)

    def delete_topology(self, name: str, timeout_s: float = 60) -> None:
        """Delete it, if it is still there, and wait until its pods are deleted."""
        self.kubectl(
            *("delete", "topo", name, "-n", self.namespace, "--ignore-not-found", "--wait=false")
        )
        wait_for(
            f"the pods of {name} to be deleted",
            lambda: not self.pods(f"{names.LABEL_TOPOLOGY}={name}"),
            timeout_s,
        )

    def is_bound(self, claim: str) -> bool:
        found = self.core_api.read_namespaced_persistent_volume_claim(claim, self.namespace)
        return found.status is not None and found.status.phase == "Bound"

    def create_host_path_claim(self, name: str, path: str, *, local: bool = False) -> None:
        """Create a claim over a directory that all nodes have. `local`: a volume whose owner the
        kubelet changes for an fsGroup; else a hostPath."""
        size: dict[str, Any] = {"storage": "10Gi"}
        everywhere = [{"key": "kubernetes.io/hostname", "operator": "Exists"}]
        affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": everywhere}]}}
        of_nodes: dict[str, Any] = {"local": {"path": path}, "nodeAffinity": affinity}
        volume: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{name}-shared"},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "claimRef": {"namespace": self.namespace, "name": name},
                **(of_nodes if local else {"hostPath": {"path": path}}),
            },
        }
        claim: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": f"{name}-shared",
                "resources": {"requests": size},
            },
        }
        self.apply(volume, claim)
        # A pod that is placed before the claim is bound would wait for the scheduler's next try.
        wait_for(f"claim {name} to be bound", lambda: self.is_bound(name), 30)


def image_values(name: str, image: str) -> list[str]:
    """The chart's values for an image."""
    tagged, at, digest = image.partition("@")
    repository, _, tag = tagged.rpartition(":")
    return ["--set", f"{name}.repository={repository},{name}.tag={tag}{at}{digest}"]
