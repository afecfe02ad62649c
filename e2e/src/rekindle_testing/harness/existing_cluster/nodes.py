"""A node of a cluster that others may use too: what kubectl can do to it, and undo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubernetes import client

from rekindle_testing.harness.any_cluster import UnsupportedByCluster
from rekindle_testing.harness.existing_cluster.leftovers import LABEL_RUN, Kubectl, RunNames
from rekindle_testing.waiting import wait_for

NO_MACHINES = "an existing cluster gives access to its API, not to its machines"
_NOT_YET = 429  # a disruption budget does not allow the eviction now


class ExistingNode:
    """Evicts only pods in the run's namespaces. Never deletes a Node: it would come back only when
    its kubelet is restarted, which cannot be done through the API."""

    def __init__(self, name: str, run: RunNames, kubectl: Kubectl, core: client.CoreV1Api) -> None:
        self.name = name
        self._run = run
        self._kubectl = kubectl
        self._core = core

    def volume(self, pod_uid: str, name: str) -> Path:
        raise UnsupportedByCluster(f"an emptyDir cannot be read: {NO_MACHINES}")

    def freeze(self) -> None:
        raise UnsupportedByCluster(f"nodes cannot be frozen: {NO_MACHINES}")

    def thaw(self) -> None:
        raise UnsupportedByCluster(f"nodes cannot be thawed: {NO_MACHINES}")

    def partition_network(self) -> None:
        raise UnsupportedByCluster(f"networks of nodes cannot be partitioned: {NO_MACHINES}")

    def heal_network(self) -> None:
        raise UnsupportedByCluster(f"nodes cannot be connected: {NO_MACHINES}")

    def drain(self, timeout_s: float = 60.0) -> None:
        # The label first: a run that is killed now leaves nothing that the next does not find.
        self._kubectl("label", "node", self.name, f"{LABEL_RUN}={self._run.id}", "--overwrite")
        self._kubectl("cordon", self.name)
        wait_for(f"the run's pods to leave {self.name}", self._is_drained, timeout_s, every_s=0.5)

    def uncordon(self) -> None:
        self._kubectl("uncordon", self.name)
        self._kubectl("label", "node", self.name, f"{LABEL_RUN}-")

    def _is_drained(self) -> bool:
        pods = [pod for pod in self._pods() if not _is_of_daemon_set(pod)]
        for pod in pods:
            if pod.metadata.deletion_timestamp is None:
                self._evict(pod)
        return not pods

    def _pods(self) -> list[Any]:
        namespaces = (self._run.namespace, self._run.operator_namespace)
        here = f"spec.nodeName={self.name}"
        lists = [self._core.list_namespaced_pod(n, field_selector=here).items for n in namespaces]
        return [pod for found in lists for pod in found]

    def _evict(self, pod: Any) -> None:
        name, namespace = pod.metadata.name, pod.metadata.namespace
        eviction: Any = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
        }
        try:
            self._core.create_namespaced_pod_eviction(name, namespace, eviction)
        except client.ApiException as error:
            # 404: it is gone; 409: it is changing. The next look evicts what is still there.
            if error.status not in (404, 409, _NOT_YET):
                raise


def _is_of_daemon_set(pod: Any) -> bool:
    """Pods of a DaemonSet, which tolerate the cordon."""
    return any(owner.kind == "DaemonSet" for owner in pod.metadata.owner_references or [])
