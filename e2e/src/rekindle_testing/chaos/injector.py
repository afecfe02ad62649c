"""Executes the faults of a chaos plan on an embedded cluster. Nothing here waits for the API
server, which may be paused: pods are those of the last sample, and calls to the API server are made
by a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, assert_never

from rekindle import names
from rekindle_testing.chaos.plan import (
    AddNode,
    DeleteNodeObject,
    FaultAction,
    Freeze,
    HealNetwork,
    KillCoordinator,
    KillLeader,
    KillNodes,
    KillTask,
    PartitionNetwork,
    PauseApiServer,
    RemoveStore,
    RestoreStore,
    ResumeApiServer,
    Thaw,
)
from rekindle_testing.chaos.sampler import Sampler
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.process_node.node_admin import NodeAdmin
from rekindle_testing.harness.cluster import EmbeddedCluster, pod_processes

_DELETE_ATTEMPTS = 60


class Injector:
    """`never_reuse_addresses`: a new node never gets the address of a dead one. Leaving the context
    resumes the API server, so that the cluster can be stopped."""

    def __init__(
        self, cluster: EmbeddedCluster, sampler: Sampler, *, never_reuse_addresses: bool
    ) -> None:
        self._cluster = cluster
        self._sampler = sampler
        self._never_reuse_addresses = never_reuse_addresses
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="node-objects")
        self._deletions: list[Future[None]] = []
        self._added: list[str] = []
        self._paused = False

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *error: object) -> None:
        if self._paused:
            self._cluster.control_plane.resume_api_server()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def wait_nodes_replaced(self) -> None:
        """Until the round's new nodes are Ready and the Node objects of its dead nodes deleted."""
        for name in self._added:
            self._cluster.nodes[name].wait_ready(60)
        self._added.clear()
        for deletion in self._deletions:
            deletion.result(60)
        self._deletions.clear()

    def apply(self, action: FaultAction) -> str:
        """Execute it; returns a description."""
        match action:
            case KillTask(topology, index):
                return self._kill_one(self._pods(topology, "task"), index)
            case KillCoordinator(topology):
                return self._kill_one(self._pods(topology, "coordinator"), 0)
            case KillLeader():
                leader = self._sampler.leader
                return self._kill_one(
                    [p for p in self._sampler.pods if p["metadata"]["name"] == leader], 0
                )
            case KillNodes(nodes):
                self._cluster.kill_nodes(
                    list(nodes), never_reuse_addresses=self._never_reuse_addresses
                )
                return f"killed {', '.join(nodes)}"
            case AddNode(node):
                started = self._cluster.launch_node().name
                assert started == node, f"{started} was started, and the plan says {node}"
                self._added.append(node)
                return f"starting {node}"
            case DeleteNodeObject(node):
                api = NodeAdmin(node, self._cluster.control_plane.kubeconfig)
                self._deletions.append(self._pool.submit(_delete, api))
                return f"deleting Node {node}"
            case Freeze(node):
                self._cluster.nodes[node].freeze()
                return f"froze {node}"
            case Thaw(node):
                self._cluster.nodes[node].thaw()
                return f"thawed {node}"
            case PartitionNetwork(node):
                self._cluster.nodes[node].partition_network()
                return f"partitioned the network of {node}"
            case HealNetwork(node):
                self._cluster.nodes[node].heal_network()
                return f"healed the network of {node}"
            case RemoveStore(topology):
                store = self._cluster.shared / topology / "checkpoints"
                store.rename(store.with_name("checkpoints-removed"))
                return f"removed the checkpoint store of {topology}"
            case RestoreStore(topology):
                store = self._cluster.shared / topology / "checkpoints"
                store.with_name("checkpoints-removed").rename(store)
                return f"restored the checkpoint store of {topology}"
            case PauseApiServer():
                self._cluster.control_plane.pause_api_server()
                self._paused = True
                return "paused the API server"
            case ResumeApiServer():
                self._paused = False
                self._cluster.control_plane.resume_api_server()
                return "resumed the API server"
            case _:
                assert_never(action)

    def _pods(self, topology: str, role: str) -> list[dict[str, Any]]:
        wanted = {names.LABEL_TOPOLOGY: topology, names.LABEL_ROLE: role}
        return sorted(
            (
                pod
                for pod in self._sampler.pods
                if wanted.items() <= (pod["metadata"].get("labels") or {}).items()
                and pod["spec"].get("nodeName") in self._cluster.nodes
                and pod.get("status", {}).get("podIP")
            ),
            key=lambda pod: str(pod["metadata"]["name"]),
        )

    def _kill_one(self, pods: list[dict[str, Any]], index: int) -> str:
        if not pods:
            return "no pod to kill"
        pod = pods[index % len(pods)]
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
        if node not in self._cluster.nodes:
            return f"{name}: its node {node} was killed before"
        found = pod_processes(self._cluster.nodes[node], pod["status"].get("podIP", "none"))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"killed {len(found)} processes of {name} on {node}"


def _delete(node: NodeAdmin) -> None:
    for _ in range(_DELETE_ATTEMPTS):
        try:
            # With `best_effort`, an API server that does not respond would count as success.
            if not node.exists():
                return
            node.delete()
        except (OSError, EmbeddedError):
            time.sleep(0.5)
    raise EmbeddedError(f"Node {node.name} could not be deleted")
