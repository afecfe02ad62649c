"""A node with its kubelet, which starts, ends and reports pods while it reaches the API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle_operator.cluster.convert import rfc3339
from rekindle_testing.simulation.kube.objects import BEGIN_UNIX_S, NODES, PODS, Json
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.network import LivenessProbe, Network, Reply
from rekindle_testing.simulation.pod import SimulatedPod
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

_SYNC_S = 0.3  # how often a kubelet compares its pods with those of the API server
_END_S = (0.3, 4.0)  # how long a pod takes to end, at least and at most
_KUBELET_PORT = 10250

MakePod = Callable[[Json, "SimulatedNode"], SimulatedPod[Any]]


class SimulatedNode:
    """`heartbeat_at`: of the newest heartbeat that the API server got. `pods` by uid."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        server: SimulatedApiServer,
        name: str,
        skew_s: float,
        allocatable: Json,
        make_pod: MakePod,
    ) -> None:
        self.name = name
        self.skew_s = skew_s
        self.up = True
        self.heartbeat_at = scheduler.now
        self.pods: dict[str, SimulatedPod[Any]] = {}
        self.kubelet = SimulatedProcess(scheduler, f"kubelet.{name}")
        self._ending: set[str] = set()
        self._scheduler = scheduler
        self._network = network
        self._server = server
        self._make_pod = make_pod
        network.node_of[self.kubelet.host] = name
        network.servers[self.kubelet.host] = self
        server.objects.add(NODES, _node_json(name, self.kubelet.host, allocatable, scheduler.now))
        self.kubelet.every(_SYNC_S, self._sync)

    # --- what fails -------------------------------------------------------------

    def kill(self) -> None:
        """All its processes end, and their disks are gone. It is silent from now on."""
        self.up = False
        self._network.isolate(self.name)
        self.kubelet.die()
        for pod in self.pods.values():
            pod.remove()
        self.pods = {}

    def reboot(self, down_s: float) -> None:
        """Its processes end; the disks stay, and its kubelet starts the containers again."""
        for pod in self.pods.values():
            pod.restart()
        self.kubelet.freeze()
        self._network.isolate(self.name)

        def start() -> None:
            self._network.rejoin(self.name)
            self.kubelet.thaw()

        self._scheduler.after(down_s, start)

    def freeze(self) -> None:
        self.kubelet.freeze()
        for pod in self.pods.values():
            pod.freeze()

    def thaw(self) -> None:
        for pod in self.pods.values():
            pod.thaw()
        self.kubelet.thaw()  # it does what it has missed: pods begin and end

    # --- the kubelet --------------------------------------------------------------

    @property
    def process(self) -> SimulatedProcess | None:
        return None if self.kubelet.dead else self.kubelet

    def serve(self, request: LivenessProbe, reply: Reply) -> None:
        reply(None)

    def _sync(self) -> None:
        if not self._server.reaches(self.kubelet.host):
            return
        self.heartbeat_at = self._scheduler.now
        objects = self._server.objects
        bound = [raw for raw in objects.all(PODS) if raw["spec"].get("nodeName") == self.name]
        for raw in bound:
            self._handle(raw)
        for uid in sorted(self.pods.keys() - {raw["metadata"]["uid"] for raw in bound}):
            self._end(uid)

    def _handle(self, raw: Json) -> None:
        uid = raw["metadata"]["uid"]
        pod = self.pods.get(uid)
        if raw["metadata"].get("deletionTimestamp"):
            if pod is None:
                self._server.objects.remove(PODS, raw)
            else:
                self._end(uid)
            return
        if pod is None:
            pod = self.pods[uid] = self._make_pod(raw, self)
        status = _pod_status(raw, pod, self._scheduler.now)
        if status != raw.get("status"):
            self._server.objects.change(PODS, raw, status=status)

    def _end(self, uid: str) -> None:
        if uid in self._ending:
            return
        self._ending.add(uid)
        self.pods[uid].stop()

        def end() -> None:
            self._ending.discard(uid)
            if (pod := self.pods.pop(uid, None)) is not None:
                pod.remove()

        self.kubelet.after(self._scheduler.between(*_END_S), end)


def _node_json(name: str, kubelet: str, allocatable: Json, now: float) -> Json:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(BEGIN_UNIX_S + now)}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {
            "conditions": [ready],
            "allocatable": allocatable,
            "addresses": [{"type": "InternalIP", "address": kubelet}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": _KUBELET_PORT}},
        },
    }


def _pod_status(raw: Json, pod: SimulatedPod[Any], now: float) -> Json:
    before = raw.get("status") or {}
    running = before.get("phase") == "Running" or pod.boot is not None
    ready = "True" if pod.is_ready else "False"
    known = next((c for c in before.get("conditions") or () if c["type"] == "Ready"), None)
    if known is None or known["status"] != ready:
        at = rfc3339(BEGIN_UNIX_S + now)
        known = {"type": "Ready", "status": ready, "lastTransitionTime": at}
    container = {
        "name": raw["spec"]["containers"][0]["name"],
        "started": pod.boot is not None,
        "ready": pod.is_ready,
        "state": {"running": {}},
    }
    return {
        "phase": "Running" if running else "Pending",
        "startTime": before.get("startTime") or rfc3339(BEGIN_UNIX_S + now),
        "podIP": pod.address,
        "conditions": [known],
        **({"containerStatuses": [container]} if running else {}),
    }
