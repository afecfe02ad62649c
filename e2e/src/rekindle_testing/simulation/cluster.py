"""A simulated cluster with one topology: nodes, API server, operators, tasks and coordinators."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Any

from rekindle import names
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.topology.model import Slot
from rekindle_operator.settings import OperatorSettings, Timing
from rekindle_testing.simulation.checks import Checks
from rekindle_testing.simulation.coordinator import CoordinatorSurroundings
from rekindle_testing.simulation.coordinator_api import NAMESPACE, TOPOLOGY, compiled
from rekindle_testing.simulation.expected import Expected
from rekindle_testing.simulation.kube.control_plane import SimulatedControlPlane, Views
from rekindle_testing.simulation.kube.node import SimulatedNode
from rekindle_testing.simulation.kube.objects import (
    ADDED,
    DELETED,
    LEASES,
    NODES,
    OWNED,
    PODS,
    RECORDS,
    TOPOLOGIES,
    ApiEvent,
    Json,
)
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.network import Network
from rekindle_testing.simulation.operator.replica import OperatorReplica
from rekindle_testing.simulation.operator_checks import OperatorChecks
from rekindle_testing.simulation.pod import CoordinatorPod, SimulatedPod, TaskPod
from rekindle_testing.simulation.scheduler import Scheduler
from rekindle_testing.simulation.silence import FaultCount
from rekindle_testing.simulation.store_and_sinks import SimulatedSinks, SimulatedStore
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.topologies import Spec
from rekindle_testing.simulation.values import TaskComputation
from rekindle_testing.simulation.waiting_checks import WaitingChecks
from rekindle_testing.simulation.working import WorkingPods
from rekindle_testing.simulation.wrong_result_checks import WrongResultChecks
from rekindle_testing.simulation.wrong_results import WrongResults

OPERATORS = ("operator-0", "operator-1")
UID = "uid-t"
_MAX_SKEW_S = 0.3
_OPERATOR_START_S = (0.5, 4.0)
_NODE_REMOVED_S = (5.0, 30.0)
_TASK_CPU_M, _TASK_MEMORY = 500, 1 << 30
_COORDINATOR_CPU_M, _COORDINATOR_MEMORY = 300, 600 << 20


SETTINGS = OperatorSettings(
    timing=Timing(rebalance_settle_s=4.0, rebalance_timeout_s=8.0, rebalance_retry_s=4.0)
)
"""Moves to emptier nodes begin and fail within the time of a simulation."""


class SimulatedCluster:
    """`pods`: the newest incarnation of each slot, while a node runs it. `topology`: as it was
    created, without later edits."""

    def __init__(
        self,
        scheduler: Scheduler,
        spec: Spec,
        nodes: int,
        buffered_epochs: int = 1024,
        operators_skew_s: float = 0.0,
        replays_take_time: bool = False,
    ) -> None:
        """`buffered_epochs`: the most that a task keeps of a channel.
        `operators_skew_s`: how far the clock of one operator is ahead, and that of the other one
        behind. `replays_take_time`: see `Surroundings`."""
        self.scheduler = scheduler
        self.topology = compiled(TOPOLOGY, spec)
        self._edited = self.topology  # as the newest spec has it
        # The slots of `_edited`, and since when it has each of them.
        self._slots = dict.fromkeys(self.topology.slots(), 0.0)
        self._spec = spec
        self.network = Network(scheduler)
        self.server = SimulatedApiServer(scheduler, self.network)
        self.store = SimulatedStore(scheduler)
        self.sinks = SimulatedSinks(scheduler)
        self.wrong_results = WrongResults()
        self.network.servers |= {self.store.host: self.store, self.sinks.host: self.sinks}
        computation = TaskComputation(self.topology)
        self.checks = Checks(
            Expected(computation),
            build_graph(self.topology),
            self.store,
            self.sinks,
            # A successor counts as the replica that it replaces (`Slot.first`).
            lambda: [pod for slot, pod in self.pods.items() if slot.first in self._slots],
            self.wrong_results,
        )
        self.nodes: dict[str, SimulatedNode] = {}
        self.pods: dict[Slot, TaskPod] = {}
        self.operators: dict[str, OperatorReplica] = {}
        # Of the API server, of operators, and of the connections between them.
        self.api_faults = FaultCount(scheduler)
        self.call_faults = FaultCount(scheduler)  # all of them but stalled watches
        self._operators_skew_s = operators_skew_s
        self._newest: dict[str, int] = {}  # incarnation of each slot, in the API
        self._drained: Counter[str] = Counter()
        self._hosts = 0
        self._pods_per_node = ceil(len(self.topology.slots()) / nodes) + 1
        self._tasks = Surroundings(
            scheduler,
            self.network,
            self.store,
            self.sinks,
            self.checks,
            self.topology.spec.epoch_interval,
            self.topology.spec.checkpoint_interval_epochs,
            self.topology,
            buffered_epochs,
            self.wrong_results,
            computation,
            replays_take_time,
        )
        self._coordinators = CoordinatorSurroundings(
            scheduler, self.network, self.server, self.store, self.checks, UID
        )
        for _ in range(nodes):
            self.add_node()
        self.views = Views(self.server)
        self.working = WorkingPods(self)
        self.operator_checks = OperatorChecks(
            self.server.objects,
            self.views,
            lambda: self.operators.values(),
            self.fail,
            self.api_faults,
            self.call_faults,
            self.working,
            lambda: scheduler.now,
        )
        self.waiting_checks = WaitingChecks(
            scheduler,
            self.views,
            self._needs,
            self.working.is_usable,
            self._can_recover,
            self.fail,
        )
        self.server.observers = [self.operator_checks.object_changed, self._pods_changed]
        meta = {"name": TOPOLOGY, "namespace": NAMESPACE, "uid": UID, "generation": 1}
        topology = {"kind": names.KIND, "metadata": meta, "spec": copy.deepcopy(spec)}
        self.server.objects.add(TOPOLOGIES, topology)
        self.control_plane = SimulatedControlPlane(scheduler, self.server, self.nodes, self.views)
        for host in OPERATORS:
            self._start_operator(host)

    def fail(self, message: str) -> None:
        """End the simulation; also when the product would catch the error."""
        self.scheduler.after(0.0, lambda: self.checks.failed(message))

    def end(self) -> None:
        """End the operators' processes: their blocking code runs in threads (`Program`)."""
        for operator in self.operators.values():
            operator.process.die()

    def _needs(self) -> Mapping[str, frozenset[tuple[str, int]]]:
        """By query, the partitions that it needs."""
        return {
            query.name: frozenset(
                (segment.id, partition)
                for segment in self._edited.needed_segments(query)
                for partition in range(segment.partitions)
            )
            for query in self._edited.spec.queries
        }

    def _can_recover(self) -> bool:
        """Whether an operator leads that can know and do anything."""
        return self.leader is not None and self.api_faults.none_for_s > 15.0

    # --- edits --------------------------------------------------------------------

    def in_spec_since(self, slot: Slot) -> float | None:
        """Since when the newest spec has a slot."""
        return self._slots.get(slot.first)

    def edit(self, kind: str, position: int, **fields: Any) -> Callable[[], None]:
        """Change fields of one item of `spec.<kind>` ("operators" or "queries"), by its position.
        Returns what changes them back."""
        known = self._spec[kind][position % len(self._spec[kind])]
        self._edit(kind, {**known, **fields})
        return lambda: self._edit(kind, known)

    def edit_template(self) -> Callable[[], None]:
        """Change what new pods are made from. Returns what changes it back."""
        self._edit_spec(podTemplate={"metadata": {"annotations": {"edited": "true"}}})
        return lambda: self._edit_spec(podTemplate={})

    def edit_refused(self, position: int, *, over_quota: bool) -> Callable[[], None]:
        """An operator, by its position, is to have two replicas; the API server refuses to create
        more, for a full quota or for good. Returns what changes both back."""
        server = self.server
        server.refuses = "exceeded quota: few" if over_quota else "denied by a policy"
        end = server.refusing.begin()
        undo = self.edit("operators", position, replicas=2)

        def heal() -> None:
            undo()
            end()

        return heal

    def delete_object(self, position: int) -> str:
        """One of the topology's objects that are not pods, by its position; returns its name."""
        objects = self.server.objects
        found = [(k, raw) for k in (*OWNED, LEASES, RECORDS) for raw in objects.all(k)]
        owned = [(k, raw) for k, raw in found if raw["metadata"].get("ownerReferences")]
        if not owned:
            return "nothing there"
        plural, raw = owned[position % len(owned)]
        objects.remove(plural, raw)
        return f"{plural} {raw['metadata']['name']}"

    def _edit(self, kind: str, edited: Spec) -> None:
        (raw,) = self.server.objects.all(TOPOLOGIES)
        items = [edited if i["name"] == edited["name"] else i for i in raw["spec"][kind]]
        self._edit_spec(**{kind: items})

    def _edit_spec(self, **fields: Any) -> None:
        (raw,) = self.server.objects.all(TOPOLOGIES)
        spec = {**raw["spec"], **fields}
        if spec != raw["spec"]:
            generation = {"generation": raw["metadata"]["generation"] + 1}
            self.server.objects.change(TOPOLOGIES, raw, spec=spec, metadata=generation)
            self._edited = compiled(TOPOLOGY, spec)
            now = self.scheduler.now
            self._slots = {s: self._slots.get(s, now) for s in self._edited.slots()}

    # --- operators ----------------------------------------------------------------

    @property
    def leader(self) -> OperatorReplica | None:
        """The replica of the operator that leads. A killed one does not, although its Lease may
        still be fresh."""
        living = (r for r in self.operators.values() if not r.process.dead)
        return next((r for r in living if r.leader.leading), None)

    def crash_operator(self, operator: OperatorReplica, down_s: float) -> None:
        """The process that replaces it knows nothing of what this one knew."""
        operator.process.die()
        wait_s = down_s + self.scheduler.between(*_OPERATOR_START_S)
        self.scheduler.after(wait_s, partial(self._start_operator, operator.process.host))

    def _start_operator(self, host: str) -> None:
        skew_s = self.scheduler.between(-_MAX_SKEW_S, _MAX_SKEW_S)
        skew_s += self._operators_skew_s * (1 if host == OPERATORS[0] else -1)
        self.network.node_of[host] = host
        self.operators[host] = OperatorReplica(
            self.scheduler,
            self.network,
            self.server,
            SETTINGS,
            host,
            skew_s,
            self.operator_checks.check_request,
        )

    # --- nodes ----------------------------------------------------------------------

    def add_node(self) -> None:
        name, number = f"node-{len(self.nodes)}", self._pods_per_node
        allocatable = {
            "cpu": f"{number * _TASK_CPU_M + _COORDINATOR_CPU_M}m",
            "memory": str(number * _TASK_MEMORY + _COORDINATOR_MEMORY),
            "pods": "50",
        }
        skew_s = self.scheduler.between(-_MAX_SKEW_S, _MAX_SKEW_S)
        self.nodes[name] = SimulatedNode(
            self.scheduler, self.network, self.server, name, skew_s, allocatable, self._make_pod
        )

    def kill_node(self, node: SimulatedNode) -> None:
        """It does not come back. Its object stays, or is removed some time later."""
        for slot in [s for s, pod in self.pods.items() if pod.uid in node.pods]:
            del self.pods[slot]
        node.kill()
        if self.scheduler.random.random() < 0.5:
            self.scheduler.after(
                self.scheduler.between(*_NODE_REMOVED_S), partial(self._remove_node, node.name)
            )

    def _remove_node(self, name: str) -> None:
        raw = self.server.objects.find(NODES, name, "")
        if raw is not None:
            self.server.objects.remove(NODES, raw)

    def _cordon(self, node: SimulatedNode, cordoned: bool) -> None:
        raw = self.server.objects.find(NODES, node.name, "")
        if raw is not None:
            self.server.objects.change(NODES, raw, spec={"unschedulable": cordoned})

    def drain(self, node: SimulatedNode) -> Callable[[], None]:
        """Cordon a node. The budget refuses evictions, so the operator moves the pods. Returns what
        ends it."""
        self._drained[node.name] += 1
        self._cordon(node, True)

        def end() -> None:
            self._drained[node.name] -= 1
            if not self._drained[node.name]:
                self._cordon(node, False)

        return end

    def evict(self, pod: SimulatedPod[Any], by_force: bool = False) -> None:
        """`by_force`: its object is gone before its kubelet has ended it."""
        raw = self.server.objects.find(PODS, pod.name)
        if by_force:
            self.remove_pod(pod.name)
        elif raw is not None and not raw["metadata"].get("deletionTimestamp"):
            self.server.objects.mark_deleted(PODS, raw)

    def gated_pods(self) -> list[str]:
        """Names of the pods that wait for capacity behind their gates."""
        raws = self.server.objects.all(PODS)
        return sorted(r["metadata"]["name"] for r in raws if r["spec"].get("schedulingGates"))

    def remove_pod(self, name: str) -> None:
        """Its object, if there is one."""
        raw = self.server.objects.find(PODS, name)
        if raw is not None:
            self.server.objects.remove(PODS, raw)

    # --- wrong results ------------------------------------------------------------

    def watch_wrong_results(self, log: Callable[[str], None]) -> None:
        """To be called before the first wrong result."""
        if self.checks.wrong_result_checks is None:
            self.checks.wrong_result_checks = WrongResultChecks(self, log)
            self.checks.wrong_result_checks.watch()

    def end_wrong_results(self) -> None:
        """Those that have not begun do not come any more."""
        for pod in self.pods.values():
            if pod.wrong_result is not None and not pod.wrong_result.has_begun:
                pod.wrong_result = None

    # --- pods -----------------------------------------------------------------------

    @property
    def running_pods(self) -> list[SimulatedPod[Any]]:
        """Also of those that are replaced."""
        return [pod for node in self.nodes.values() for pod in node.pods.values()]

    @property
    def coordinator(self) -> CoordinatorPod | None:
        """The newest one."""
        found = [
            pod
            for node in self.nodes.values()
            for pod in node.pods.values()
            if type(pod) is CoordinatorPod
        ]
        return max(found, key=lambda p: p.fence, default=None)

    def _make_pod(self, raw: Json, node: SimulatedNode) -> SimulatedPod[Any]:
        view = self.views.pod(raw)
        self._hosts += 1
        host = f"10.0.{self._hosts // 250}.{self._hosts % 250}"
        self.network.node_of[host] = node.name
        if view.slot is None:
            fence = view.incarnation
            return CoordinatorPod(
                self._coordinators, node.kubelet, view.name, view.uid, fence, host
            )
        segment = self._edited.segment(view.slot.segment)
        pod = TaskPod(
            self._tasks,
            node.kubelet,
            view.name,
            view.uid,
            view.slot,
            segment,
            view.incarnation,
            host,
            node.skew_s,
        )
        if view.incarnation >= self._newest.get(view.ref.slot, 0):
            self.pods[view.slot] = pod
        return pod

    def _pods_changed(self, plural: str, event: ApiEvent) -> None:
        """A replaced or deleted task does not count any more, though it may run."""
        if plural != PODS:
            return
        view = self.views.pod(event.raw)
        if event.type == ADDED:
            self._newest[view.ref.slot] = view.incarnation
        if view.slot is None or (pod := self.pods.get(view.slot)) is None:
            return
        is_deleted = event.type == DELETED and pod.uid == view.uid
        if is_deleted or pod.incarnation < self._newest.get(view.ref.slot, 0):
            del self.pods[view.slot]
