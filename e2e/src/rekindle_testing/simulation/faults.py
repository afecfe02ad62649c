"""The faults of a simulation: a list that is drawn from the seed, and can be made shorter.

Design: docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random

from rekindle_testing.simulation.cluster import SimulatedCluster
from rekindle_testing.simulation.network import API, SINKS, STORE

FAULTS_S = 60.0
"""When the last group of faults begins."""
GROUP_S = 3.0
LONGEST_S = 25.0
_SLOWNESS = 30.0


class FaultKind(StrEnum):
    CRASH_TASK = "a task's container is killed"
    STOP_TASK = "a task's container is killed, and starts only later"
    CRASH_ENGINE = "a task's engine dies"
    SLOW_TASK = "a task's engine is slow"
    FREEZE_TASK = "a task is frozen"
    KILL_NODE = "a node dies, and another one comes"
    FREEZE_NODE = "a node is frozen"
    PARTITION_NODE = "a network partition between a node and all others"
    PARTITION_FROM_API = "a network partition between a node and the API server"
    PARTITION_FROM_STORE = "a network partition between a node and the store"
    PARTITION_PAIR = "a network partition between two nodes"
    PARTITION_ONE_WAY = "a node does not hear another one"
    STORE_DOWN = "the store is down"
    SINKS_DOWN = "the sinks are down"
    CRASH_COORDINATOR = "the coordinator is killed"
    SECOND_COORDINATOR = "the coordinator is replaced while it runs"
    FREEZE_COORDINATOR = "the coordinator is frozen"


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` and `other` choose tasks or nodes: positions in their lists, modulo the length.
    `seconds`: how long it lasts."""

    at: float
    kind: FaultKind
    target: int
    other: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:5.2f} s for {self.seconds:4.1f} s: {self.kind} ({self.target})"


def draw_faults(random: Random) -> list[Fault]:
    """In groups, because what happens at the same time is what is hard."""
    faults: list[Fault] = []
    kinds = random.sample(list(FaultKind), random.randint(2, len(FaultKind)))
    for _ in range(random.randint(2, 7)):
        begin = random.uniform(3.0, FAULTS_S)
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            faults.append(
                Fault(
                    round(begin + random.uniform(0, GROUP_S), 2),
                    random.choice(kinds),
                    random.randrange(1000),
                    random.randrange(1000),
                    round(random.choice((0.3, 1.0, 3.0, LONGEST_S)) * random.uniform(0.5, 1), 2),
                )
            )
    return sorted(faults, key=lambda f: f.at)


class Injector:
    """Begins and ends faults in a cluster. `log` gets a line for each."""

    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._log = log

    def plan(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._scheduler.after(fault.at, partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        what, end = self._inject(fault)
        self._log(f"{fault.kind} for {fault.seconds} s: {what}")
        if end is not None:

            def heal() -> None:
                self._log(f"over: {fault.kind}: {what}")
                end()

            self._scheduler.after(fault.seconds, heal)

    def _inject(self, fault: Fault) -> tuple[str, Callable[[], None] | None]:
        """What it strikes, and how it ends."""
        cluster = self._cluster
        nodes = [n for n in cluster.nodes.values() if n.up]
        node, other = nodes[fault.target % len(nodes)], nodes[fault.other % len(nodes)]
        slots = sorted(cluster.pods, key=lambda s: s.key)
        slot = slots[fault.target % len(slots)] if slots else None
        pod = cluster.pods[slot] if slot is not None else None
        coordinator = cluster.coordinator
        match fault.kind:
            case FaultKind.CRASH_TASK if pod is not None:
                pod.restart()
                return pod.slot.key, None
            case FaultKind.STOP_TASK if pod is not None:
                pod.restart(fault.seconds)
                return pod.slot.key, None
            case FaultKind.SLOW_TASK if pod is not None:
                pod.slowness = _SLOWNESS
                return pod.slot.key, lambda: setattr(pod, "slowness", 1.0)
            case FaultKind.CRASH_ENGINE if pod is not None and pod.boot is not None:
                pod.boot.crash_engine()
                return pod.slot.key, None
            case FaultKind.FREEZE_TASK if pod is not None:
                pod.freeze()
                return pod.slot.key, pod.thaw
            case FaultKind.KILL_NODE:
                cluster.kill_node(node)
                return node.name, cluster.add_node
            case FaultKind.FREEZE_NODE:
                cluster.freeze_node(node)
                return node.name, lambda: cluster.thaw_node(node)
            case FaultKind.PARTITION_NODE:
                peers = [*(n.name for n in nodes if n is not node), API, STORE, SINKS]
                links = [link for peer in peers for link in _both_ways(node.name, peer)]
                return node.name, self._disconnect(links)
            case FaultKind.PARTITION_FROM_API:
                return node.name, self._disconnect(_both_ways(node.name, API))
            case FaultKind.PARTITION_FROM_STORE:
                return node.name, self._disconnect(_both_ways(node.name, STORE))
            case FaultKind.PARTITION_PAIR:
                links = _both_ways(node.name, other.name)
                return f"{node.name}, {other.name}", self._disconnect(links)
            case FaultKind.PARTITION_ONE_WAY:
                return f"{other.name} to {node.name}", self._disconnect([(other.name, node.name)])
            case FaultKind.STORE_DOWN:
                cluster.store.down = True
                return STORE, lambda: setattr(cluster.store, "down", False)
            case FaultKind.SINKS_DOWN:
                cluster.sinks.down = True
                return SINKS, lambda: setattr(cluster.sinks, "down", False)
            case FaultKind.CRASH_COORDINATOR if coordinator is not None:
                coordinator.process.die()
                return str(coordinator.fence), None
            case FaultKind.SECOND_COORDINATOR:
                cluster.start_coordinator()
                return str(len(cluster.coordinators)), None
            case FaultKind.FREEZE_COORDINATOR if coordinator is not None:
                coordinator.process.freeze()
                return str(coordinator.fence), coordinator.process.thaw
            case _:
                return "nothing there", None

    def _disconnect(self, links: Sequence[tuple[str, str]]) -> Callable[[], None]:
        network = self._cluster.network
        for link in links:
            network.disconnect(*link)

        def reconnect() -> None:
            for link in links:
                network.reconnect(*link)

        return reconnect


def _both_ways(one: str, other: str) -> list[tuple[str, str]]:
    return [(one, other), (other, one)]


def heal_all(cluster: SimulatedCluster) -> None:
    """Whatever still lasts is over."""
    cluster.network.reconnect_all()
    cluster.store.down = cluster.sinks.down = False
    for node in cluster.nodes.values():
        if node.frozen:
            cluster.thaw_node(node)
    for pod in cluster.pods.values():
        pod.thaw()
    for coordinator in cluster.coordinators:
        coordinator.process.thaw()
