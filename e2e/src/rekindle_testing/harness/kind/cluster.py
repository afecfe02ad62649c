"""Rekindle on a cluster of its own, made by the program `kind` (Kubernetes in Docker) and deleted
at the end.

One cluster at a time on a machine, with a fixed name: a file lock shows whether its owner is alive.
So the next run deletes what a killed one has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.directories import cache_root
from rekindle_testing.harness.any_cluster import Cluster, UnsupportedByCluster
from rekindle_testing.harness.cluster import NAMESPACE, OPERATOR_NAMESPACE
from rekindle_testing.harness.cluster_programs import (
    ClusterNotUsable,
    ClusterPrograms,
    ProgramError,
    run,
)
from rekindle_testing.harness.kind.nodes import KindNode, docker
from rekindle_testing.harness.kind.settings import Settings
from rekindle_testing.harness.nodes import POD_USER
from rekindle_testing.images.archives import ensure_image_archives
from rekindle_testing.progress import OnProgress, no_progress
from rekindle_testing.waiting import wait_for

NAME = "rekindle-e2e"
_SHARED = "/mnt/rekindle-shared"  # the shared directory, on every node
_CREATE_TIMEOUT_S = 600
_READY_TIMEOUT_S = 180


class KindCluster(Cluster):
    """From `start` (or `with`) to `stop`. `nodes`: how many workers; only these fail."""

    namespace = NAMESPACE
    operator_namespace = OPERATOR_NAMESPACE
    nodes: dict[str, KindNode]

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        *,
        nodes: int = 5,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        self.nodes = {}
        self._settings = settings
        self._node_count = nodes
        self._on_progress = on_progress
        self._killed: list[KindNode] = []
        self._images = settings.images
        self._cleanup = contextlib.ExitStack()
        self._programs = ClusterPrograms(self.kubeconfig)

    def start(self) -> None:
        for program in ("docker", "kind"):
            if shutil.which(program) is None:
                raise ClusterNotUsable(f"NODES=kind needs {program} on PATH")
        try:
            self._cleanup.enter_context(_exclusive_lock())
            if NAME in _kind("get", "clusters").split():
                self._on_progress("deleting the kind cluster that an earlier run has left")
                _kind("delete", "cluster", "--name", NAME, timeout_s=_CREATE_TIMEOUT_S)
            self._create()
            self._connect()
            self._load_images()
            for namespace in (NAMESPACE, OPERATOR_NAMESPACE):
                self.create_restricted_namespace(namespace)
            for name in sorted(_kind("get", "nodes", "--name", NAME).split()):
                if not name.startswith(f"{NAME}-control-plane"):
                    self.nodes[name] = KindNode(name, self._programs)
        except BaseException:
            self.stop()
            raise

    def _create(self) -> None:
        self.shared.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(self.shared, POD_USER, POD_USER)
        else:
            self.shared.chmod(0o777)
        path = self.directory / "kind.json"
        path.write_text(json.dumps(configuration(self._node_count, self.shared)))
        self._on_progress(f"kind creates {NAME} with {self._node_count} workers")
        self._cleanup.callback(
            _kind, "delete", "cluster", "--name", NAME, timeout_s=_CREATE_TIMEOUT_S
        )
        image = ("--image", self._settings.node_image) if self._settings.node_image else ()
        files = ("--config", str(path), "--kubeconfig", str(self.kubeconfig))
        wait = ("--wait", f"{_READY_TIMEOUT_S}s")
        _kind(
            "create", "cluster", "--name", NAME, *files, *wait, *image, timeout_s=_CREATE_TIMEOUT_S
        )

    def _load_images(self) -> None:
        """Load the archives of built images. Of images that the settings name, load those that
        Docker has; the nodes pull the others."""
        if self._images is None:
            built = ensure_image_archives(self._on_progress)
            self._images = (built["operator"].tag, built["pipelines"].tag)
            for archive in built.values():
                load = ("load", "image-archive", str(archive.path))
                _kind(*load, "--name", NAME, timeout_s=_CREATE_TIMEOUT_S)
        else:
            for image in self._images:
                if _is_local(image):
                    _kind(
                        "load", "docker-image", image, "--name", NAME, timeout_s=_CREATE_TIMEOUT_S
                    )

    def stop(self) -> None:
        """Delete the cluster."""
        self._cleanup.close()

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        return self._programs.kubectl(*arguments, stdin=stdin, timeout_s=timeout_s)

    @property
    def images(self) -> tuple[str, str]:
        assert self._images is not None, "started"
        return self._images

    def _install_options(self) -> list[str]:
        # The control plane's node never fails, so a replica of the operator there never would.
        return ["--set", "onControlPlane=false"]

    def create_claim(self, name: str) -> None:
        self.create_host_path_claim(name, _SHARED)

    def upload(self, path: str) -> None:
        """The volume is `shared` itself."""

    def download(self, path: str) -> None:
        """The volume is `shared` itself."""

    def move(self, path: str, to: str) -> None:
        """In a node: the files belong to the user of the pods."""
        node = next(iter(self.nodes))
        docker("exec", node, "mv", f"{_SHARED}/{path}", f"{_SHARED}/{to}")

    # -- nodes --------------------------------------------------------------------------------

    def kill_nodes(self, names: list[str]) -> None:
        docker("kill", *names)
        self._killed += [self.nodes.pop(name) for name in names]

    def add_node(self) -> str:
        """Restart the node that was killed first, with its name and its disk."""
        if not self._killed:
            raise UnsupportedByCluster(
                "kind cannot add a node to a cluster, and no killed node is left to start again"
            )
        node = self._killed.pop(0)
        before = self._renewed_at(node.name)
        node.start()

        # The Node may still be reported Ready from before.
        def is_ready() -> bool:
            return self._renewed_at(node.name) != before and self._is_ready(node.name)

        wait_for(f"{node.name} to be Ready", is_ready, _READY_TIMEOUT_S, every_s=0.5)
        self.nodes[node.name] = node
        return node.name

    def _renewed_at(self, name: str) -> Any:
        lease = self.coordination.read_namespaced_lease(name, "kube-node-lease")
        return lease.spec and lease.spec.renew_time

    def _is_ready(self, name: str) -> bool:
        status = self.core_api.read_node(name).status
        conditions = (status and status.conditions) or []
        return any((c.type, c.status) == ("Ready", "True") for c in conditions)

    def kill_processes(self, pod: Any) -> None:
        self.nodes[pod.spec.node_name].kill_processes(pod.status.pod_ip)


def configuration(workers: int, shared: Path) -> dict[str, Any]:
    """The configuration file of kind: every node has the shared directory, and workers are in three
    zones."""
    mounts = [{"hostPath": str(shared), "containerPath": _SHARED}]
    nodes: list[dict[str, Any]] = [{"role": "control-plane", "extraMounts": mounts}]
    for number in range(workers):
        labels = {"topology.kubernetes.io/zone": f"zone-{'abc'[number % 3]}"}
        nodes.append({"role": "worker", "extraMounts": mounts, "labels": labels})
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}


def _kind(*arguments: str, timeout_s: float = 60) -> str:
    return run(("kind", *arguments), timeout_s=timeout_s)


def _is_local(image: str) -> bool:
    try:
        docker("image", "inspect", image)
    except ProgramError:
        return False
    return True


@contextlib.contextmanager
def _exclusive_lock() -> Iterator[None]:
    path = cache_root(os.environ) / "kind.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterNotUsable(
                f"another run uses the kind cluster {NAME}: wait for its end"
            ) from error
        yield
