"""What must hold of the operator's actions, whenever it takes one (docs/invariants.md)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from rekindle import names
from rekindle_operator.cluster.amounts import total
from rekindle_operator.cluster.model import PodView
from rekindle_testing.fixtures.placement import has_other_replica
from rekindle_testing.simulation.kube.control_plane import Views
from rekindle_testing.simulation.kube.objects import (
    ADDED,
    DELETED,
    MODIFIED,
    NODES,
    PODS,
    TOPOLOGIES,
    ApiEvent,
    ApiObjects,
    ApiRequest,
    Json,
)
from rekindle_testing.simulation.operator.replica import OperatorReplica
from rekindle_testing.simulation.silence import FaultCount
from rekindle_testing.simulation.working import WorkingPods

_READ_S = 3.0
"""The pods of the topology have been read within so many seconds before one is deleted or
replaced."""
_UNCERTAIN_S = 15.0
"""For so long after faults of the API server, or of itself, an operator may not know what is
there."""


class OperatorChecks:
    """`failed` ends the simulation. `api_faults`: of the API server, of operators, and of what is
    between them; `call_faults`: these but stalled watches."""

    def __init__(
        self,
        objects: ApiObjects,
        views: Views,
        replicas: Callable[[], Iterable[OperatorReplica]],
        failed: Callable[[str], None],
        api_faults: FaultCount,
        call_faults: FaultCount,
        working: WorkingPods,
        clock: Callable[[], float],
    ) -> None:
        self._objects = objects
        self._views = views
        self._replicas = replicas
        self._failed = failed
        self._api_faults = api_faults
        self._call_faults = call_faults
        self._working = working
        self._clock = clock
        self._cordoned_until: dict[str, float] = {}  # by node; infinite while it is
        # By uid: whether it was added or deleted, its name, and when.
        self._pods_changed: dict[str, tuple[str, str, float]] = {}
        self._highest: dict[str, int] = {}  # incarnation that was created, by slot
        self._used_by: dict[tuple[str, int], str] = {}  # uid of the pod of each incarnation

    def object_changed(self, plural: str, event: ApiEvent) -> None:
        if plural == NODES:
            self._note_cordon(event.raw)
        if plural != PODS:
            return
        if event.type in (ADDED, DELETED):
            meta = event.raw["metadata"]
            self._pods_changed[meta["uid"]] = event.type, meta["name"], self._clock()
        if event.type == ADDED:
            self._check_new_pod(event.raw)
        elif event.type == MODIFIED and not event.raw["spec"].get("schedulingGates"):
            pod = self._views.pod(event.raw)
            self._check_placement(pod)
            if pod.node is not None:
                self._check_incarnation(pod)

    def check_request(self, replica: OperatorReplica, request: ApiRequest) -> None:
        """I9: one replica leads, and only that one changes anything. No pod that works is deleted
        unless it is replaced."""
        leading = [r for r in self._replicas() if not r.process.dead and r.leader.leading]
        others = [r for r in leading if r is not replica]
        if others or not replica.leader.no_other_can_lead:  # its last Lease has run out
            hosts = [r.process.host for r in leading]
            self._failed(
                f"I9: {replica.process.host} sends {request.verb} {request.path}; leaders: {hosts}"
            )
        *_, plural, name = request.path.partition("?")[0].split("/")
        raw = self._objects.find(PODS, name) if plural == PODS else None
        if request.verb == "DELETE" and raw is not None:
            self._check_has_read(replica, request)
            self._check_deletion(self._views.pod(raw))
        elif request.verb == "POST" and plural == PODS and _incarnation(request.body) > 1:
            self._check_has_read(replica, request)

    def _check_has_read(self, replica: OperatorReplica, request: ApiRequest) -> None:
        """Before anything is deleted or replaced, all pods of the topology are read, since watches
        may be stalled."""
        if self._call_faults.none_for_s <= _UNCERTAIN_S:
            return
        known = {pod.uid for pod in replica.cache.pods.views()}
        for uid, (change, name, at) in self._pods_changed.items():
            ago_s = self._clock() - at
            if (uid in known) != (change == ADDED) and ago_s > _READ_S:
                self._failed(
                    f"not read before {request.verb} {request.path}: "
                    f"{name} was {change.lower()} {ago_s:.1f} s ago"
                )

    def _check_deletion(self, pod: PodView) -> None:
        slot = pod.ref.slot
        is_newest = pod.incarnation == self._highest[slot]
        works = is_newest and self._is_calm and self._working.find(slot) == pod.name
        if works and not self._has_moved(pod):
            self._failed(f"{pod.name} is deleted, which works and was not silent")

    def _has_moved(self, pod: PodView) -> bool:
        """In a planned move: whether its successor serves, so that it may be deleted."""
        if pod.slot is None:  # a coordinator, which has no successor
            return self._is_on_cordoned_node(pod.name)
        return self._working.serves(pod.slot.alternate)

    def _note_cordon(self, node: Json) -> None:
        name = node["metadata"]["name"]
        if node["spec"].get("unschedulable"):
            self._cordoned_until[name] = math.inf
        elif self._cordoned_until.get(name) == math.inf:
            self._cordoned_until[name] = self._clock()

    def _is_on_cordoned_node(self, pod: str) -> bool:
        """Or one that was cordoned when the operator decided."""
        raw = self._objects.find(PODS, pod)
        node = raw["spec"].get("nodeName", "") if raw else ""
        return self._clock() - self._cordoned_until.get(node, -math.inf) < _UNCERTAIN_S

    @property
    def _is_calm(self) -> bool:
        return self._api_faults.none_for_s > _UNCERTAIN_S

    def _check_new_pod(self, raw: Json) -> None:
        """I9: an incarnation is reserved before its pod is created. A request that arrives late may
        create the pod of an earlier one, which replaces nothing."""
        pod = self._views.pod(raw)
        slot, name = pod.ref.slot, pod.name
        (topology,) = self._objects.all(TOPOLOGIES)
        slots = (topology.get("status") or {}).get("slots") or ()
        reserved = {s["slot"]: s["incarnation"] for s in slots}
        removed = f"{names.ALL_REMOVED_SEGMENTS}/{slot.partition('/')[2]}"  # by edits: merged there
        if max(reserved.get(slot, 0), reserved.get(removed, 0)) < pod.incarnation:
            self._failed(f"I9: {name} is created, and its incarnation is not reserved")
        if pod.incarnation <= self._highest.get(slot, 0):
            return
        self._highest[slot] = pod.incarnation
        is_task = pod.role == names.ROLE_TASK
        working = self._working.find(slot) if is_task or self._is_calm else None
        if working is not None and not self._is_on_cordoned_node(working):
            self._failed(f"{name} replaces {working}, which works and was not silent")

    def _check_incarnation(self, pod: PodView) -> None:
        """I9: no two pods of an incarnation run, whatever was created twice."""
        first = self._used_by.setdefault((pod.ref.slot, pod.incarnation), pod.uid)
        if first != pod.uid:
            self._failed(f"I9: incarnation {pod.incarnation} of {pod.ref.slot} is used twice")

    def _check_placement(self, pod: PodView) -> None:
        """I6: capacity, and replicas on different nodes. An operator that did not hear what the API
        server has done may open a gate for nothing: the scheduler leaves that pod unbound."""
        name = pod.node or pod.required_node
        if name is None or pod.role != names.ROLE_TASK or pod.terminating:
            return
        if pod.node is None and not self._is_calm:
            return
        here = [
            p
            for p in self._views.pods()
            if name in (p.node, p.required_node)
            and p.role == names.ROLE_TASK
            and not (p.ended or p.terminating or p.gates)
            and (p.node is not None or self._is_calm)
        ]
        node = next((n for n in self._views.nodes() if n.name == name), None)
        if node is not None and not node.allocatable.covers(total(p.requests for p in here)):
            pods = sorted(p.name for p in here)
            self._failed(f"I6: {name} has capacity for {node.allocatable}, not for {pods}")
        if has_other_replica(pod, here):
            self._failed(f"I6: another replica of {pod.name} is on {name}")


def _incarnation(pod: Json) -> int:
    return int(pod["metadata"]["labels"][names.LABEL_INCARNATION])


class OperatorErrors(logging.Handler):
    """Errors that the operator logs, none of which is expected."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        error: Any = record.exc_info[1] if record.exc_info else None
        self._failed(f"the operator logs: {record.getMessage()}: {error!r}")
