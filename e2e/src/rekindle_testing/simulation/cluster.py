"""Nodes and pods, and a stand-in for the operator.

The stand-in replaces what it takes for lost: a pod or coordinator on a node that the API server
has not heard for a while. It does not see what still runs there, so replaced ones may go on, as in
a network partition; they end when their node is heard again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from rekindle.coordinator.model import Generation, Pod, partition_of
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.topology.model import Slot
from rekindle_testing.simulation.checks import Checks
from rekindle_testing.simulation.coordinator import CoordinatorProcess
from rekindle_testing.simulation.network import API, Network
from rekindle_testing.simulation.outside import SimulatedSinks, SimulatedStore
from rekindle_testing.simulation.pod import SimulatedPod
from rekindle_testing.simulation.scheduler import Process, Scheduler
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.values import Expected

_RECONCILE_S = 0.5
_LOST_AFTER_S = (3.0, 8.0)
_END_REPLACED_S = (0.5, 3.0)
_MAX_SKEW_S = 0.3
_RELIST_S = 2.0


@dataclass(slots=True)
class Node:
    """`heard_at`: when the API server last heard its kubelet."""

    name: str
    skew_s: float
    up: bool = True
    frozen: bool = False
    heard_at: float = 0.0
    pods: list[SimulatedPod] = field(default_factory=list)


class SimulatedCluster:
    """One topology on nodes. `pods`: the newest incarnation of each slot."""

    def __init__(self, scheduler: Scheduler, generation: Generation, nodes: int) -> None:
        topology = generation.topology
        self.scheduler = scheduler
        self.generation = generation
        self.network = Network(scheduler)
        self.store = SimulatedStore(scheduler)
        self.sinks = SimulatedSinks(scheduler)
        self.network.servers |= {self.store.host: self.store, self.sinks.host: self.sinks}
        self.graph = build_graph(topology)
        self.checks = Checks(
            Expected(topology), self.graph, self.store, self.sinks, lambda: self.pods.values()
        )
        self.nodes: dict[str, Node] = {}
        self.pods: dict[Slot, SimulatedPod] = {}
        self.coordinators: list[CoordinatorProcess] = []
        self._segments = {segment.id: segment for segment in topology.segments}
        self._incarnations: dict[Slot, int] = {}
        self._hosts = 0
        self._surroundings = Surroundings(
            scheduler,
            self.network,
            self.store,
            self.sinks,
            self.checks,
            topology.spec.epoch_interval,
            topology.spec.checkpoint_interval_epochs,
        )
        self._lost_after_s = scheduler.between(*_LOST_AFTER_S)
        self._pods_per_node = ceil(len(topology.slots()) / nodes) + 1
        for _ in range(nodes):
            self.add_node()
        operator = Process(scheduler, API)
        operator.every(_RECONCILE_S, self._reconcile)
        operator.every(_RELIST_S, self._list_pods)

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        """The newest one."""
        return self.coordinators[-1] if self.coordinators else None

    def add_node(self) -> None:
        skew_s = self.scheduler.between(-_MAX_SKEW_S, _MAX_SKEW_S)
        name = f"node-{len(self.nodes)}"
        self.nodes[name] = Node(name, skew_s, heard_at=self.scheduler.now)

    # --- what fails ---

    def kill_node(self, node: Node) -> None:
        """All its processes end, and their disks are gone."""
        node.up = False
        for pod in node.pods:
            pod.remove()
        node.pods = []
        for coordinator in self._coordinators_on(node):
            coordinator.process.die()

    def freeze_node(self, node: Node) -> None:
        node.frozen = True
        for pod in node.pods:
            pod.freeze()
        for coordinator in self._coordinators_on(node):
            coordinator.process.freeze()

    def thaw_node(self, node: Node) -> None:
        node.frozen = False
        for pod in node.pods:
            pod.thaw()
        for coordinator in self._coordinators_on(node):
            coordinator.process.thaw()

    def _coordinators_on(self, node: Node) -> list[CoordinatorProcess]:
        node_of = self.network.node_of
        return [c for c in self.coordinators if node_of[c.process.host] == node.name]

    def start_coordinator(self) -> None:
        """The next incarnation; one that still runs does not know of it."""
        node = self._some_node((), for_pod=False)
        if node is None:
            return
        host = self._host_on(node)
        self.coordinators.append(
            CoordinatorProcess(
                self.scheduler,
                self.network,
                self.store,
                self.checks,
                self.generation,
                len(self.coordinators) + 1,
                host,
            )
        )
        self._list_pods()

    # --- the operator, kubelets and the API server ---

    def _reconcile(self) -> None:
        self._hear_nodes()
        coordinator = self.coordinator
        if coordinator is None or coordinator.retired or self._is_lost(coordinator.process.host):
            self.start_coordinator()
        changed = False
        slots = list(self.generation.topology.slots())
        self.scheduler.random.shuffle(slots)
        for slot in slots:
            pod = self.pods.get(slot)
            if pod is None or self._is_lost(pod.address):
                changed |= self._create(slot)
        if changed:
            self._list_pods()

    def _hear_nodes(self) -> None:
        for node in self.nodes.values():
            if node.up and not node.frozen and self.network.is_up(node.name, API):
                node.heard_at = self.scheduler.now
                if self.network.is_up(API, node.name):
                    self._end_replaced(node)

    def _end_replaced(self, node: Node) -> None:
        for pod in [p for p in node.pods if self.pods.get(p.slot) is not p]:
            node.pods.remove(pod)
            self.scheduler.after(self.scheduler.between(*_END_REPLACED_S), pod.remove)
        for coordinator in self._coordinators_on(node):
            if coordinator is not self.coordinator and not coordinator.retired:
                delay_s = self.scheduler.between(*_END_REPLACED_S)
                self.scheduler.after(delay_s, coordinator.process.die)

    def _is_lost(self, host: str) -> bool:
        node = self.nodes[self.network.node_of[host]]
        return self.scheduler.now - node.heard_at > self._lost_after_s

    def _create(self, slot: Slot) -> bool:
        partition = partition_of(slot)
        others = [p for s, p in self.pods.items() if s != slot and partition_of(s) == partition]
        node = self._some_node(self.network.node_of[p.address] for p in others)
        if node is None:
            return False
        self._incarnations[slot] = self._incarnations.get(slot, 0) + 1
        segment = self._segments[slot.segment]
        address = self._host_on(node)
        pod = SimulatedPod(
            self._surroundings, slot, segment, self._incarnations[slot], address, node.skew_s
        )
        self.pods[slot] = pod
        node.pods.append(pod)
        return True

    def _some_node(self, excluded: Iterable[str], for_pod: bool = True) -> Node | None:
        """One of those with the fewest pods that the API server hears; for a pod, one with
        capacity."""
        names = set(excluded)
        usable = [
            n
            for n in self.nodes.values()
            if n.up and not n.frozen and n.heard_at == self.scheduler.now and n.name not in names
        ]
        if for_pod:
            usable = [n for n in usable if len(n.pods) < self._pods_per_node]
        fewest = min((len(n.pods) for n in usable), default=0)
        best = [n for n in usable if len(n.pods) == fewest]
        return self.scheduler.random.choice(best) if best else None

    def _host_on(self, node: Node) -> str:
        self._hosts += 1
        host = f"10.0.{self._hosts // 250}.{self._hosts % 250}"
        self.network.node_of[host] = node.name
        return host

    def _list_pods(self) -> None:
        """Tell the coordinators which pods there are; a message may be lost, or overtaken."""
        for coordinator in self.coordinators:
            if coordinator.retired:
                continue
            deliver = partial(coordinator.pods_listed, self._listing())
            self.network.send(API, coordinator.process.host, deliver)

    def _listing(self) -> tuple[Pod, ...]:
        return tuple(
            Pod(
                f"{slot.key}-{pod.incarnation}",
                slot,
                pod.incarnation,
                pod.address,
                may_be_running=True,
                was_ready=pod.was_ready,
            )
            for slot, pod in self.pods.items()
        )
