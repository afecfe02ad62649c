"""The scheduler, the controller of nodes and the collector of orphaned pods.

The scheduler binds only what fits, and never two replicas of a partition to one node.
"""

from __future__ import annotations

from collections.abc import Mapping

from rekindle_operator.cluster.amounts import total
from rekindle_operator.cluster.convert import node_view, pod_view, rfc3339
from rekindle_operator.cluster.model import NodeView, PodView
from rekindle_testing.fixtures.placement import has_other_replica, node_affinity_allows
from rekindle_testing.simulation.kube.node import SimulatedNode
from rekindle_testing.simulation.kube.objects import BEGIN_UNIX_S, NODES, PODS, ApiObjects, Json
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.scheduler import Scheduler

_SCHEDULE_S = 0.2
_NODES_S = 1.0
_GRACE_S = (8.0, 20.0, 50.0)
_ORPHANED_S = 20.0


class Views:
    """Views of the newest objects; each version is parsed once."""

    def __init__(self, server: SimulatedApiServer) -> None:
        self._objects = server.objects
        self._pods: dict[str, tuple[Json, PodView]] = {}
        self._nodes: dict[str, tuple[Json, NodeView]] = {}

    def pods(self) -> list[PodView]:
        return [self.pod(raw) for raw in self._objects.all(PODS)]

    def pod(self, raw: Json) -> PodView:
        uid = raw["metadata"]["uid"]
        known = self._pods.get(uid)
        if known is None or known[0] is not raw:
            known = self._pods[uid] = raw, pod_view(raw)
        return known[1]

    def nodes(self) -> list[NodeView]:
        found = []
        for raw in self._objects.all(NODES):
            uid = raw["metadata"]["uid"]
            known = self._nodes.get(uid)
            if known is None or known[0] is not raw:
                known = self._nodes[uid] = raw, node_view(raw)
            found.append(known[1])
        return found


class SimulatedControlPlane:
    """`scheduler`: of simulated time, not of pods. `grace_s`: without heartbeats, after which
    a node is not Ready."""

    def __init__(
        self,
        scheduler: Scheduler,
        server: SimulatedApiServer,
        nodes: Mapping[str, SimulatedNode],
        views: Views,
    ) -> None:
        self.grace_s = scheduler.random.choice(_GRACE_S)
        self._scheduler = scheduler
        self._server = server
        self._nodes = nodes
        self._views = views
        self._orphaned_since: dict[str, float] = {}
        assert server.process is not None
        server.process.every(_SCHEDULE_S, self._schedule)
        server.process.every(_NODES_S, self._watch_nodes)

    def _schedule(self) -> None:
        if self._server.down:
            return
        for raw in self._server.objects.all(PODS):
            meta, spec = raw["metadata"], raw["spec"]
            if spec.get("nodeName") or spec.get("schedulingGates") or "deletionTimestamp" in meta:
                continue
            found = [n.name for n in self._views.nodes() if self._fits(raw, n)]
            if found:
                node = self._scheduler.random.choice(sorted(found))
                self._server.objects.change(PODS, raw, spec={**spec, "nodeName": node})

    def _fits(self, raw: Json, node: NodeView) -> bool:
        if not node.ready or node.cordoned or not node_affinity_allows(raw, node.name):
            return False
        pod = self._views.pod(raw)
        here = [p for p in self._views.pods() if p.node == node.name and not p.ended]
        left = node.allocatable - total(p.requests for p in here)
        return left.covers(pod.requests) and not has_other_replica(pod, here)

    def _watch_nodes(self) -> None:
        if self._server.down:
            return
        objects, now = self._server.objects, self._scheduler.now
        for raw in objects.all(NODES):
            node = self._nodes[raw["metadata"]["name"]]
            status = "True" if now - node.heartbeat_at < self.grace_s else "Unknown"
            _set_ready(objects, NODES, raw, status, now)
            if status != "True":
                self._mark_pods_not_ready(node.name)
        self._collect_orphans({raw["metadata"]["name"] for raw in objects.all(NODES)})

    def _mark_pods_not_ready(self, node: str) -> None:
        """They may run on; their kubelet sets them to ready again when it is back."""
        objects = self._server.objects
        for raw in objects.all(PODS):
            if raw["spec"].get("nodeName") == node and self._views.pod(raw).ready:
                _set_ready(objects, PODS, raw, "False", self._scheduler.now)

    def _collect_orphans(self, nodes: set[str]) -> None:
        """Pods whose node is gone are deleted, after a while."""
        objects, now = self._server.objects, self._scheduler.now
        for raw in objects.all(PODS):
            name, uid = raw["spec"].get("nodeName"), raw["metadata"]["uid"]
            if name and name not in nodes:
                since = self._orphaned_since.setdefault(uid, now)
                if now - since > _ORPHANED_S:
                    objects.remove(PODS, raw)


def _set_ready(objects: ApiObjects, plural: str, raw: Json, status: str, now: float) -> None:
    (known,) = raw["status"]["conditions"]
    if known["status"] != status:
        at = rfc3339(BEGIN_UNIX_S + now)
        ready = {"type": "Ready", "status": status, "lastTransitionTime": at}
        objects.change(plural, raw, status={**raw["status"], "conditions": [ready]})
