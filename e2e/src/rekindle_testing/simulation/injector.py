"""How faults are injected into a simulated cluster.

Design: docs/simulation.md#faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rekindle_testing.simulation.cluster import OPERATORS, SimulatedCluster
from rekindle_testing.simulation.faults import EVICTS_GATED, FaultKind, SimulatedFault
from rekindle_testing.simulation.lending import Borrowing
from rekindle_testing.simulation.network import API, SINKS, STORE
from rekindle_testing.simulation.pod import TaskPod
from rekindle_testing.simulation.silence import FaultCount
from rekindle_testing.simulation.wrong_results import Recurrence, WrongResult

_LOOK_S = 0.1
"""How often it is checked whether a session has begun."""
_MAX_PARTY_DELAY_S = 2.5
"""The longest time from the begin of a session until one of its parties fails."""

Injected = tuple[str, Callable[[], None] | None]
"""The name of what a fault hits, and what ends the fault."""


_API_FAULTS = frozenset(
    {
        FaultKind.API_DOWN,
        FaultKind.API_ERRORS,
        FaultKind.STALL_WATCHES,
        FaultKind.CRASH_OPERATOR,
        FaultKind.FREEZE_OPERATOR,
        FaultKind.PARTITION_OPERATOR,
        FaultKind.LOSE_REPLIES_TO_OPERATOR,
    }
)


class SimulatedInjector:
    """Begins and ends faults in a cluster. `log` gets a line for each. `silent`: the names of the
    nodes and tasks whose fault stays."""

    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._log = log
        self.silent: set[str] = set()

    def plan(self, faults: Sequence[SimulatedFault]) -> None:
        for fault in faults:
            self._scheduler.after(fault.at, partial(self._begin, fault))

    @staticmethod
    def ends_at(faults: Sequence[SimulatedFault]) -> float:
        """A fault that stays is over as soon as it has begun."""
        return max((f.at + (0.0 if f.stays else f.seconds) for f in faults), default=0.0)

    def _begin(self, fault: SimulatedFault) -> None:
        what, end = self._inject(fault)
        self._log(f"{fault.kind} for {fault.duration}: {what}")
        if fault.stays:
            self.silent.add(what)
            self._cluster.add_node()
            return
        counts = self._fault_counts(fault.kind)
        for count in counts:
            count.began()

        def heal() -> None:
            for count in counts:
                count.ended()
            if end is not None:
                self._log(f"over: {fault.kind}: {what}")
                end()

        self._scheduler.after(fault.seconds, heal)

    def _fault_counts(self, kind: FaultKind) -> Sequence[FaultCount]:
        cluster = self._cluster
        if kind is FaultKind.STALL_WATCHES:
            return [cluster.api_faults]
        return [cluster.api_faults, cluster.call_faults] if kind in _API_FAULTS else []

    def _inject(self, fault: SimulatedFault) -> Injected:
        """What it hits, and what ends it."""
        injected = (
            self._inject_into_task(fault)
            or self._inject_into_node(fault)
            or self._inject_into_network(fault)
            or self._inject_into_control_plane(fault)
        )
        return injected or ("nothing there", None)

    def _inject_into_task(self, fault: SimulatedFault) -> Injected | None:
        slots = sorted(self._cluster.pods, key=lambda s: s.key)
        if not slots:
            return None
        pod = self._cluster.pods[slots[fault.target % len(slots)]]
        key = f"{pod.slot.key} incarnation {pod.incarnation}"
        match fault.kind:
            case FaultKind.CRASH_TASK:
                pod.restart()
                return key, None
            case FaultKind.STOP_TASK:
                pod.restart(fault.seconds)
                return key, None
            case FaultKind.SLOW_TASK:
                return key, pod.slow.begin()
            case FaultKind.CRASH_ENGINE if pod.boot is not None:
                pod.boot.crash_engine()
                return key, None
            case FaultKind.FAIL_TENTATIVE:
                pod.tentative_fails = True
                return key, None
            case FaultKind.FREEZE_TASK:
                pod.freeze()
                return key, pod.thaw
            case FaultKind.FAIL_TASK:
                pod.call_fails = True
                if fault.other % 4 == 0:
                    self._cluster.evict(pod)  # it fails while it ends, or before that
                return key, None
            case FaultKind.EVICT_TASK:
                gated = self._cluster.gated_pods()
                if gated and fault.other % EVICTS_GATED == 0:
                    name = gated[fault.target % len(gated)]
                    self._cluster.remove_pod(name)
                    return f"{name}, behind its gate", None
                self._cluster.evict(pod, by_force=bool(fault.other % 2))
                return key, None
            case FaultKind.WRONG_RESULT:
                return self._inject_wrong_result(fault)
            case FaultKind.FAIL_LENDER | FaultKind.FAIL_NEWCOMER:
                return self._inject_into_lending(fault)
        return None

    def _inject_wrong_result(self, fault: SimulatedFault) -> Injected:
        """`other` chooses what the replica computes if it computes the epoch again."""
        cluster, slots = self._cluster, Borrowing(self._cluster).replaceable()
        cluster.watch_wrong_results(self._log)
        if not slots:
            return "no replica has a Live partner", None
        pod = cluster.pods[slots[fault.target % len(slots)]]
        recurrence = list(Recurrence)[fault.other % len(Recurrence)]
        pod.wrong_result = pod.wrong_result or WrongResult(recurrence)
        what = f"{pod.slot.key} incarnation {pod.incarnation}, {pod.wrong_result.recurrence.name}"
        return what, None

    def _inject_into_lending(self, fault: SimulatedFault) -> Injected:
        """Lose a replica that has a partner; then let one party fail: the partner that lends its
        state to the new pod, or that pod."""
        cluster, parties = self._cluster, Borrowing(self._cluster)
        slots = parties.replaceable()
        if not slots:
            return "no replica has a Live partner", None
        lost = cluster.pods[slots[fault.target % len(slots)]]
        cluster.evict(lost, by_force=True)
        lends = fault.kind is FaultKind.FAIL_LENDER
        over_at, ends = self._scheduler.now + fault.seconds, list[Callable[[], None]]()

        def fail_party() -> None:
            party = parties.lender_for(lost.slot) if lends else parties.newcomer(lost.slot)
            if party is not None:
                self._log(f"{fault.kind}: {party.slot.key} incarnation {party.incarnation}")
                ends.append(self._fail_party(party, fault.other))

        def look() -> None:
            found = parties.lender_for(lost.slot) if lends else parties.newcomer(lost.slot)
            if found is not None:
                self._scheduler.after((fault.other % 10) * _MAX_PARTY_DELAY_S / 10, fail_party)
            elif self._scheduler.now < over_at:
                self._scheduler.after(_LOOK_S, look)

        def end() -> None:
            for end_failure in ends:
                end_failure()

        look()
        return f"{lost.slot.key} incarnation {lost.incarnation}", end

    def _fail_party(self, party: TaskPod, how: int) -> Callable[[], None]:
        """Returns what ends it. The last digit of `how` has chosen the time, the others choose
        the failure."""
        cluster, nothing = self._cluster, lambda: None
        match how // 10 % 6:
            case 0:
                party.restart()
            case 1:
                party.freeze()
                return party.thaw
            case 2:
                cluster.evict(party)
            case 3:
                cluster.evict(party, by_force=True)
            case 4:
                party.disk.unreadable = True
            case 5 if (coordinator := cluster.coordinator) is not None:
                coordinator.restart()
        return nothing

    def _inject_into_node(self, fault: SimulatedFault) -> Injected | None:
        cluster = self._cluster
        nodes = [n for n in cluster.nodes.values() if n.up]
        node = nodes[fault.target % len(nodes)]
        match fault.kind:
            case FaultKind.KILL_NODE if len(nodes) > 1:
                cluster.kill_node(node)
                return node.name, cluster.add_node
            case FaultKind.REBOOT_NODE:
                node.reboot(fault.seconds)
                return node.name, None
            case FaultKind.FREEZE_NODE:
                node.freeze()
                return node.name, node.thaw
            case FaultKind.DRAIN_NODE:
                return node.name, cluster.drain(node)
            case FaultKind.ADD_NODE:
                cluster.add_node()
                return "", None
            case FaultKind.STOP_KUBELET:
                node.kubelet.freeze()
                return node.name, node.kubelet.thaw
        return None

    def _inject_into_network(self, fault: SimulatedFault) -> Injected | None:
        network = self._cluster.network
        nodes = [n.name for n in self._cluster.nodes.values() if n.up]
        node, other = nodes[fault.target % len(nodes)], nodes[fault.other % len(nodes)]
        match fault.kind:
            case FaultKind.PARTITION_NODE:
                network.isolate(node)
                return node, lambda: network.rejoin(node)
            case FaultKind.PARTITION_FROM_API:
                return node, self._disconnect(_both_ways(node, API))
            case FaultKind.PARTITION_FROM_STORE:
                return node, self._disconnect(_both_ways(node, STORE))
            case FaultKind.PARTITION_PAIR:
                return f"{node}, {other}", self._disconnect(_both_ways(node, other))
            case FaultKind.PARTITION_ONE_WAY:
                return f"{other} to {node}", self._disconnect([(other, node)])
        return None

    def _inject_into_control_plane(self, fault: SimulatedFault) -> Injected | None:
        cluster, server = self._cluster, self._cluster.server
        match fault.kind:
            case FaultKind.STORE_DOWN:
                return STORE, cluster.store.down.begin()
            case FaultKind.SINKS_DOWN:
                return SINKS, cluster.sinks.down.begin()
            case FaultKind.EDIT_REPLICAS:
                return "", cluster.edit("operators", fault.target, replicas=2)
            case FaultKind.EDIT_PRIORITY:
                return "", cluster.edit("queries", fault.target, priority=fault.other)
            case FaultKind.EDIT_TEMPLATE:
                return "", cluster.edit_template()
            case FaultKind.REFUSE_EDIT:
                return "", cluster.edit_refused(fault.target, over_quota=bool(fault.other % 2))
            case FaultKind.DELETE_OBJECT:
                return cluster.delete_object(fault.target), None
            case FaultKind.API_DOWN:
                return API, server.down.begin()
            case FaultKind.API_ERRORS:
                return API, server.fails.begin()
            case FaultKind.STALL_WATCHES:
                host = OPERATORS[fault.target % len(OPERATORS)]
                server.stall(host, fault.seconds)
                return host, None
            case FaultKind.EXPIRE_WATCHES:
                host = OPERATORS[fault.target % len(OPERATORS)]
                server.expire_watches(host)
                return host, None
        return self._inject_into_coordinator(fault) or self._inject_into_operator(fault)

    def _inject_into_coordinator(self, fault: SimulatedFault) -> Injected | None:
        coordinator = self._cluster.coordinator
        if coordinator is None:
            return None
        match fault.kind:
            case FaultKind.CRASH_COORDINATOR:
                coordinator.restart()
                return str(coordinator.fence), None
            case FaultKind.EVICT_COORDINATOR:
                self._cluster.evict(coordinator)
                return str(coordinator.fence), None
            case FaultKind.FREEZE_COORDINATOR:
                coordinator.freeze()
                return str(coordinator.fence), coordinator.thaw
        return None

    def _inject_into_operator(self, fault: SimulatedFault) -> Injected | None:
        leader = self._cluster.leader
        if leader is None:
            return None
        host = leader.process.host
        match fault.kind:
            case FaultKind.CRASH_OPERATOR:
                self._cluster.crash_operator(leader, fault.seconds)
                return host, None
            case FaultKind.FREEZE_OPERATOR:
                leader.process.freeze()
                return host, leader.process.thaw
            case FaultKind.PARTITION_OPERATOR:
                return host, self._disconnect(_both_ways(host, API))
            case FaultKind.LOSE_REPLIES_TO_OPERATOR:
                return host, self._disconnect([(API, host)])
        return None

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
