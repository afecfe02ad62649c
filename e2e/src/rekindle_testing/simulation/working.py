"""Which pods work: they are ready, and respond to whoever would report that they are lost.

Coordinators and operators are not asked: the simulation knows which processes run and which links
are up.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from rekindle import names
from rekindle.topology.model import Slot
from rekindle_operator.cluster.model import NodeView
from rekindle_testing.simulation.kube.objects import PODS
from rekindle_testing.simulation.pod import CoordinatorPod, SimulatedPod, TaskPod
from rekindle_testing.simulation.silence import Silence

if TYPE_CHECKING:
    from rekindle_testing.simulation.cluster import SimulatedCluster
    from rekindle_testing.simulation.kube.node import SimulatedNode

_OBSERVED_EVERY_S, _PHASES_EVERY_S = 0.25, 0.1
_DECIDED_S = 1.5
"""A decision of the operator is executed within so many seconds after what the tasks reported."""
_SETTLED_S = 10.0
"""A pod works once it has been ready and needed for so long."""
_AVOIDED_S = 65.0
"""For so long an operator may avoid a node: one that was silent, for `Timing.quarantine_s`; one
whose tasks were silent while its kubelet responded, for 30 s, or longer if that happens again."""


class WorkingPods:
    """Of the newest incarnations."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self._scheduler = cluster.scheduler
        self._silence = Silence(cluster.scheduler)
        self._ready_since: dict[str, float] = {}  # by uid
        self._silent_at: dict[str, float] = {}  # by node, the last time
        self._live_at: dict[str, float] = {}  # by uid, the last time
        self._observe()
        self._observe_phases()

    def find(self, slot: str) -> str | None:
        """The name of the pod of a slot, if that has been ready and needed for a while, and was not
        silent lately."""
        pods = self._with(self._cluster.coordinator)
        pod = next((p for p in pods if _slot_of(p) == slot), None)
        if pod is None or not self._is_responsive(pod):
            return None
        wrong = self._cluster.checks.wrong_result_checks
        if wrong is not None and isinstance(pod, TaskPod) and wrong.guarantees.may_be_replaced(pod):
            return None
        raw = self._cluster.server.objects.find(PODS, pod.name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            return None
        since = [self._ready_since.get(pod.uid), self._in_spec_since(pod)]
        now = self._scheduler.now
        return pod.name if all(s is not None and now - s > _SETTLED_S for s in since) else None

    def serves(self, slot: Slot) -> bool:
        """Whether its pod runs a task that is Live, or was so when the operator decided."""
        pod = self._cluster.pods.get(slot)
        if pod is None:
            return False
        live_at = self._live_at.get(pod.uid, -inf)
        return pod.is_live or self._scheduler.now - live_at < _DECIDED_S

    def is_usable(self, view: NodeView) -> bool:
        """Whether a node takes pods, and was silent for nobody lately, so that no operator avoids
        it."""
        node = self._cluster.nodes[view.name]
        is_reached = self._cluster.server.reaches(node.kubelet.host)
        has_all_links = not self._network.has_link_down(node.name)
        if not (is_reached and has_all_links and self._responds_to_probes(node)):
            self._silent_at[node.name] = self._scheduler.now
        silent_at = self._silent_at.get(node.name, -inf)
        return view.ready and not view.cordoned and self._scheduler.now - silent_at > _AVOIDED_S

    def _with(self, coordinator: CoordinatorPod | None) -> list[SimulatedPod[Any]]:
        found: list[SimulatedPod[Any]] = [*self._cluster.pods.values()]
        return found if coordinator is None else [*found, coordinator]

    def _in_spec_since(self, pod: SimulatedPod[Any]) -> float | None:
        return self._cluster.in_spec_since(pod.slot) if isinstance(pod, TaskPod) else 0.0

    def _is_responsive(self, pod: SimulatedPod[Any]) -> bool:
        """A coordinator is lost with its node, also if that is said to be lost by mistake."""
        silence, kubelet = self._silence, self._node(pod).kubelet
        return silence.responds_steadily(pod.address) and (
            isinstance(pod, TaskPod) or silence.responds_steadily(kubelet.host)
        )

    # --- who responds now -----------------------------------------------------------

    def _observe(self) -> None:
        now, coordinator = self._scheduler.now, self._cluster.coordinator
        for pod in self._with(coordinator):
            if pod.is_ready:
                self._ready_since.setdefault(pod.uid, now)
            else:
                self._ready_since.pop(pod.uid, None)
            if self._is_reached(pod, coordinator):
                self._silence.responded(pod.address)
        for node in self._cluster.nodes.values():
            if self._responds_to_probes(node):
                self._silence.responded(node.kubelet.host)
        self._scheduler.after(_OBSERVED_EVERY_S, self._observe)

    def _observe_phases(self) -> None:
        for pod in self._cluster.pods.values():
            if pod.is_live:
                self._live_at[pod.uid] = self._scheduler.now
        self._scheduler.after(_PHASES_EVERY_S, self._observe_phases)

    def _is_reached(self, pod: SimulatedPod[Any], coordinator: CoordinatorPod | None) -> bool:
        if not pod.runs:
            return False
        if isinstance(pod, CoordinatorPod):
            return self._cluster.server.reaches(pod.address)
        responds_to_probes = self._responds_to_probes(self._node(pod))
        if coordinator is None or coordinator.boot is None:  # none that could miss it
            return responds_to_probes
        # A frozen coordinator may report later what it has found silent before.
        can_report = coordinator.runs and self._cluster.server.reaches(coordinator.address)
        is_connected = self._network.is_connected(coordinator.address, pod.address)
        return is_connected and (can_report or responds_to_probes)

    def _responds_to_probes(self, node: SimulatedNode) -> bool:
        kubelet = node.kubelet
        return not (kubelet.dead or kubelet.frozen) and all(
            self._network.is_connected(operator, kubelet.host)
            for operator in self._cluster.operators
        )

    def _node(self, pod: SimulatedPod[Any]) -> SimulatedNode:
        return self._cluster.nodes[self._network.node_of[pod.address]]


def _slot_of(pod: SimulatedPod[Any]) -> str:
    return pod.slot.key if isinstance(pod, TaskPod) else names.COORDINATOR_KEY
