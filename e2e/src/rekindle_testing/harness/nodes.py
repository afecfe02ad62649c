"""The kinds of nodes that a cluster can have: what a cluster needs of them, and what differs.

A kind is started before the control plane and stopped after it, since kubelet nodes bring the
network that the API server listens on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rekindle_testing.embedded.components import LOOPBACK
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.embedded.kubelet_node.network import NodeNetwork
from rekindle_testing.embedded.kubelet_node.node import KubeletNode
from rekindle_testing.embedded.kubelet_node.packages import ensure_host_prerequisites
from rekindle_testing.embedded.process_node.node import ImageReplacement, ProcessNode
from rekindle_testing.embedded.toolchain import ensure_java
from rekindle_testing.harness.any_cluster import ClusterNode
from rekindle_testing.harness.cds_archive import ensure_cds_archive
from rekindle_testing.images.archives import ensure_image_archives
from rekindle_testing.progress import OnProgress

POD_USER = 10001
"""User and group of both images."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What pods may request of a node: the default is for two tasks of 500m CPU."""

    cpu: str = "1300m"
    memory: str = "4Gi"


class EmbeddedNode(ClusterNode, Protocol):
    """A machine of the embedded cluster: what `ProcessNode` and `KubeletNode` have in common."""

    zone: str

    @property
    def address(self) -> str: ...
    @property
    def pids(self) -> list[int]: ...
    @property
    def volumes(self) -> Path:
        """Directory with all volumes of all its pods."""

    def start(self) -> None: ...
    def wait_ready(self, timeout_s: float = ...) -> None: ...
    def stop(self) -> None: ...
    def kill(self, *, never_reuse_address: bool = False) -> None:
        """`never_reuse_address`: no later node gets the address of this one."""

    def delete_node_object(self) -> None: ...
    def restart_agent(self) -> None: ...


class NodeKind(Protocol):
    """Makes the nodes of one cluster."""

    name: str
    operator_image: str
    pipelines_image: str

    @property
    def api_address(self) -> str:
        """The address on which the API server has to listen; known after `start`."""

    def prepare_shared(self, directory: Path) -> None:
        """Let pods write to a directory of this machine."""

    def start(self, directory: Path, on_progress: OnProgress) -> None: ...
    def stop(self) -> None: ...
    def make(
        self, name: str, plane: ControlPlane, directory: Path, zone: str, resources: NodeResources
    ) -> EmbeddedNode: ...
    def agent_logs(self, nodes: Path) -> Iterable[Path]:
        """Logs of the agents (or kubelets) of all nodes with a directory in `nodes`, also of lost
        ones."""

    def pod_logs(self, nodes: Path) -> Iterable[Path]:
        """A file for each container, or attempt of one, on nodes that are not lost."""

    def pod_of(self, log: Path) -> str:
        """Name of the pod; OSError if it is deleted."""

    def name_of(self, log: Path) -> str:
        """Container and attempt, as the name of a file."""


class ProcessNodes:
    """Nodes that run pods as processes of this checkout's environment."""

    name = "process"
    operator_image = "rekindle/operator:dev"
    pipelines_image = "rekindle/pipelines:dev"
    api_address = LOOPBACK

    def __init__(self) -> None:
        self._images: Mapping[str, ImageReplacement] = {}

    def start(self, directory: Path, on_progress: OnProgress) -> None:
        java_home = ensure_java(on_progress)
        binaries = Path(sys.executable).parent
        environment = {
            "JAVA_HOME": str(java_home),
            "REKINDLE_CDS_ARCHIVE": str(ensure_cds_archive(java_home, on_progress)),
            "PYTHONUNBUFFERED": "1",
        }
        path = (str(binaries), str(java_home / "bin"))
        self._images = {
            self.operator_image: ImageReplacement(path=path, env={"PYTHONUNBUFFERED": "1"}),
            self.pipelines_image: ImageReplacement(path=path, env=environment),
        }

    def stop(self) -> None:
        self._images = {}

    def prepare_shared(self, directory: Path) -> None:
        """Pods have the user of this process."""

    def agent_logs(self, nodes: Path) -> Iterable[Path]:
        return nodes.glob("*/agent.log")

    def pod_logs(self, nodes: Path) -> Iterable[Path]:
        return nodes.glob("*/data/pods/*/containers/*/*/log*")

    def pod_of(self, log: Path) -> str:
        return str(json.loads((log.parents[3] / "pod.json").read_text())["metadata"]["name"])

    def name_of(self, log: Path) -> str:
        container, attempt = log.parts[-3:-1]
        return f"{container}-{attempt}.{log.name}"

    def make(
        self, name: str, plane: ControlPlane, directory: Path, zone: str, resources: NodeResources
    ) -> ProcessNode:
        return ProcessNode(
            name,
            plane,
            directory,
            zone=zone,
            cpu=resources.cpu,
            memory=resources.memory,
            images=self._images,
        )


class KubeletNodes:
    """Real kubelets and containerd, with the images of this checkout. `lease_duration_s`: of the
    kubelets' node leases, four times the seconds between two renewals."""

    name = "kubelet"

    def __init__(self, lease_duration_s: int = 8) -> None:
        self._lease_duration_s = lease_duration_s
        self._network: NodeNetwork | None = None
        self._archives: list[Path] = []
        self.operator_image = self.pipelines_image = ""

    @property
    def network(self) -> NodeNetwork:
        assert self._network is not None, "started by the cluster"
        return self._network

    @property
    def api_address(self) -> str:
        return self.network.host_address

    def start(self, directory: Path, on_progress: OnProgress) -> None:
        ensure_host_prerequisites(on_progress)
        built = ensure_image_archives(on_progress)
        self.operator_image, self.pipelines_image = built["operator"].tag, built["pipelines"].tag
        self._archives = [archive.path for archive in built.values()]
        network = NodeNetwork(directory / "network", on_progress=on_progress)
        network.start()
        self._network = network

    def stop(self) -> None:
        if self._network is not None:
            self._network.stop()

    def prepare_shared(self, directory: Path) -> None:
        """Make the user of the images its owner, as in a cluster for the volume of a claim."""
        os.chown(directory, POD_USER, POD_USER)

    def agent_logs(self, nodes: Path) -> Iterable[Path]:
        return nodes.glob("*/logs/*.log")

    def pod_logs(self, nodes: Path) -> Iterable[Path]:
        # A directory is named NAMESPACE_POD_UID, a file by the attempt.
        return nodes.glob("*/data/pod-logs/*/*/*.log*")

    def pod_of(self, log: Path) -> str:
        return log.parts[-3].split("_")[1]

    def name_of(self, log: Path) -> str:
        return f"{log.parts[-2]}-{log.name}"

    def make(
        self, name: str, plane: ControlPlane, directory: Path, zone: str, resources: NodeResources
    ) -> KubeletNode:
        return KubeletNode(
            name,
            plane,
            directory,
            network=self.network,
            zone=zone,
            cpu=resources.cpu,
            memory=resources.memory,
            archives=self._archives,
            lease_duration_s=self._lease_duration_s,
        )
