"""The parties of state movements in progress, as faults look for them."""

from __future__ import annotations

from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot
from rekindle_testing.simulation.cluster import SimulatedCluster
from rekindle_testing.simulation.pod import TaskPod


class Movements:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def replaceable(self) -> list[Slot]:
        """The replicas that have a Live partner."""
        pods = self._cluster.pods
        found = [slot for slot in pods if any(pod.is_live for pod in self._partners(slot))]
        return sorted(found, key=lambda slot: slot.key)

    def newcomer(self, slot: Slot) -> TaskPod | None:
        """The pod of a slot, or of its successor in a planned move, that waits for state."""
        for found in (slot, slot.alternate):
            pod = self._cluster.pods.get(found)
            if pod is not None and _phase_of(pod) is TaskPhase.WAITING:
                return pod
        return None

    def donor_for(self, slot: Slot) -> TaskPod | None:
        """The pod that gives state to the newcomer of a slot, or of its successor in a planned
        move."""
        newcomers = (slot, slot.alternate)
        for pod in self._partners(slot):
            donor = pod.boot.core.donor if pod.boot is not None else None
            if donor is not None and any(s.slot in newcomers for s in donor.sessions):
                return pod
        return None

    def _partners(self, slot: Slot) -> list[TaskPod]:
        pods = self._cluster.pods
        return [
            pods[other]
            for other in sorted(pods, key=lambda s: s.key)
            if other.first != slot.first  # not the same replica under its other number
            and (other.segment, other.partition) == (slot.segment, slot.partition)
        ]


def _phase_of(pod: TaskPod) -> TaskPhase | None:
    return pod.boot.core.status.phase if pod.boot is not None else None
