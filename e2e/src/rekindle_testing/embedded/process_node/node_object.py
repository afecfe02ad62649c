"""The Node and its Lease in the API.

Knows the objects and when to write them, nothing about pods.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError, Unreachable
from rekindle_testing.embedded.process_node.fields import Json
from rekindle_testing.embedded.process_node.settings import NodeSettings
from rekindle_testing.embedded.process_node.status import rfc3339

log = logging.getLogger(__name__)

# The version of the control plane.
KUBELET_VERSION = "v1.34.4"

_CONDITIONS = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "not measured by a process node"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "not measured by a process node"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "not measured by a process node"),
    ("Ready", "True", "KubeletReady", "process node is posting ready status"),
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def node_labels(settings: NodeSettings) -> dict[str, str]:
    machine = platform.machine()
    return {
        "kubernetes.io/hostname": settings.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": _ARCHITECTURES.get(machine, machine),
        "topology.kubernetes.io/zone": settings.zone,
        **settings.labels,
    }


def node_status(settings: NodeSettings, changed_at: float, now: float) -> Json:
    machine = platform.machine()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "capacity": dict(settings.capacity),
        "allocatable": dict(settings.capacity),
        "addresses": [
            {"type": "InternalIP", "address": settings.address},
            {"type": "Hostname", "address": settings.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": settings.kubelet_port}},
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": rfc3339(now),
                "lastTransitionTime": rfc3339(changed_at),
            }
            for kind, status, reason, message in _CONDITIONS
        ],
        "nodeInfo": {
            "machineID": hashlib.sha256(settings.name.encode()).hexdigest()[:32],
            "systemUUID": hashlib.sha256(settings.directory.encode()).hexdigest()[:32],
            "bootID": boot,
            "kernelVersion": os.uname().release,
            "osImage": "process node",
            "containerRuntimeVersion": "process://1",
            "kubeletVersion": KUBELET_VERSION,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": _ARCHITECTURES.get(machine, machine),
        },
        "images": [{"names": [name], "sizeBytes": 0} for name in sorted(settings.images)],
    }


class NodeObject:
    """Registers the node and renews its Lease and status."""

    def __init__(
        self, api: ApiClient, settings: NodeSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._ready_since = clock()
        self._node_path = f"/api/v1/nodes/{settings.name}"
        self._leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

    async def register(self) -> None:
        """Once for each start of the agent: a Node that is deleted later stays deleted."""
        labels = node_labels(self._settings)
        body: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._settings.name, "labels": labels},
        }
        try:
            node = await self._api.create("/api/v1/nodes", body)
        except NodeApiError as error:
            if error.status != 409:
                raise
            node = await self._api.merge_patch(self._node_path, {"metadata": {"labels": labels}})
        for condition in (node.get("status") or {}).get("conditions") or []:
            if condition["type"] == "Ready" and condition["status"] != "True":
                self._ready_since = self._clock()
        await self.report()

    async def report(self) -> None:
        status = node_status(self._settings, self._ready_since, self._clock())
        await self._api.strategic_merge_patch(f"{self._node_path}/status", {"status": status})

    async def keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(self._settings.timing.status_interval_s)
            await self._tolerate("status", self.report())

    async def keep_lease(self) -> None:
        """Renew the Lease forever. After a gap, in which the Node may have become Unknown, write
        the status too."""
        last_success = self._clock()
        while True:
            if await self._tolerate("lease", self._renew()):
                now = self._clock()
                if now - last_success > self._settings.timing.lease_duration_s:
                    self._ready_since = now
                    await self._tolerate("status", self.report())
                last_success = now
            await asyncio.sleep(self._settings.timing.lease_renew_s)

    async def _renew(self) -> None:
        # Wall time: users and controllers compare Leases.
        stamp = f"{rfc3339(now := self._clock())[:-1]}.{int(now % 1 * 1e6):06d}Z"
        spec = {
            "holderIdentity": self._settings.name,
            "leaseDurationSeconds": self._settings.timing.lease_duration_s,
            "renewTime": stamp,
        }
        try:
            await self._api.merge_patch(f"{self._leases}/{self._settings.name}", {"spec": spec})
        except NodeApiError as error:
            if error.status != 404:
                raise
            await self._create_lease(spec)

    async def _create_lease(self, spec: Json) -> None:
        node = await self._api.get(self._node_path)
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._settings.name,
            "uid": node["metadata"]["uid"],
        }
        metadata = {
            "name": self._settings.name,
            "namespace": "kube-node-lease",
            "ownerReferences": [owner],
        }
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        await self._api.create(self._leases, body)

    async def _tolerate(self, what: str, call: Awaitable[None]) -> bool:
        """Await a write; an error is logged. Returns whether it succeeded."""
        try:
            await call
        except (NodeApiError, Unreachable) as error:
            log.warning("%s of node %s not written: %s", what, self._settings.name, error)
            return False
        return True
