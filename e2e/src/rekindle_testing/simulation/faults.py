"""The faults of a simulation: a list that is drawn from the seed, and can be made shorter.

Design: docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from random import Random

from rekindle_testing.simulation.cluster import OPERATORS, SimulatedCluster
from rekindle_testing.simulation.movements import Movements
from rekindle_testing.simulation.network import API, SINKS, STORE
from rekindle_testing.simulation.pod import TaskPod
from rekindle_testing.simulation.silence import FaultCount
from rekindle_testing.simulation.wrong_results import Recurrence, WrongResult

_FIRST_S, FAULTS_S = 3.0, 60.0
"""When the first group of faults begins at the earliest, and the last one at the latest."""
GROUP_S = 3.0
"""The faults of a group begin within this time."""
LONGEST_S = 25.0
_LOOK_S = 0.1
"""How often it is checked whether a session has begun."""
_MAX_PARTY_DELAY_S = 2.5
"""The longest time from the begin of a session until one of its parties fails."""


Injected = tuple[str, Callable[[], None] | None]
"""The name of what a fault hits, and what ends the fault."""


class FaultKind(StrEnum):
    CRASH_TASK = "a task's container is killed"
    STOP_TASK = "a task's container is killed, and starts only later"
    CRASH_ENGINE = "a task's engine dies"
    SLOW_TASK = "a task's engine is slow"
    FAIL_TASK = "a task's next call fails for good"
    FAIL_TENTATIVE = "a task's next tentative epoch fails"
    FREEZE_TASK = "a task is frozen"
    EVICT_TASK = "a task is evicted, or its pod deleted by force"
    FAIL_DONOR = "a replica is lost, and the donor of the newcomer in its place fails"
    FAIL_NEWCOMER = "a replica is lost, and the newcomer in its place fails"
    WRONG_RESULT = "a replica that has a partner computes a wrong result"
    KILL_NODE = "a node dies, and another one comes"
    REBOOT_NODE = "a node restarts, with its disks"
    FREEZE_NODE = "a node is frozen"
    DRAIN_NODE = "a node is drained"
    ADD_NODE = "a node comes"
    STOP_KUBELET = "a kubelet is frozen"
    PARTITION_NODE = "a network partition between a node and all others"
    PARTITION_FROM_API = "a network partition between a node and the API server"
    PARTITION_FROM_STORE = "a network partition between a node and the store"
    PARTITION_PAIR = "a network partition between two nodes"
    PARTITION_ONE_WAY = "a node gets no packets from another one"
    STORE_DOWN = "the store is down"
    SINKS_DOWN = "the sinks are down"
    CRASH_COORDINATOR = "the coordinator is killed"
    EVICT_COORDINATOR = "the coordinator is evicted"
    FREEZE_COORDINATOR = "the coordinator is frozen"
    EDIT_REPLICAS = "an operator of the topology has two replicas for a while"
    EDIT_PRIORITY = "a query has another priority for a while"
    API_DOWN = "the API server is down"
    API_ERRORS = "the API server refuses and fails"
    STALL_WATCHES = "the watches of an operator are stalled"
    EXPIRE_WATCHES = "the versions of an operator's watches have expired"
    CRASH_OPERATOR = "the operator that leads is killed"
    FREEZE_OPERATOR = "the operator that leads is frozen"
    PARTITION_OPERATOR = "a network partition between the operator that leads and the API server"
    LOSE_REPLIES_TO_OPERATOR = "the API server's replies to the operator that leads are lost"


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


_INPUT_FAULTS = (
    FaultKind.STOP_TASK,
    FaultKind.STOP_TASK,
    FaultKind.FREEZE_TASK,
    FaultKind.SLOW_TASK,
    FaultKind.PARTITION_PAIR,
    FaultKind.PARTITION_ONE_WAY,
    FaultKind.FREEZE_NODE,
)
_DURING_FAILURES = (
    FaultKind.CRASH_TASK,
    FaultKind.CRASH_ENGINE,
    FaultKind.FAIL_TENTATIVE,
    FaultKind.FAIL_TENTATIVE,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.FREEZE_TASK,
)
_DURING_DISAGREEMENT = (
    FaultKind.CRASH_COORDINATOR,
    FaultKind.CRASH_COORDINATOR,
    FaultKind.EVICT_COORDINATOR,
    FaultKind.FREEZE_COORDINATOR,
    FaultKind.CRASH_TASK,
    FaultKind.FREEZE_TASK,
)
_DISAGREEMENT_S = 2.0, 7.0
"""Replicas disagree in this time after a fault that makes one of them compute a wrong result."""
_EDITED_WHILE_WRONG = 0.3
_FAILS_WHILE_CORRECTING = 0.1
"""Shares of the seeds with wrong results, and of those with tentative ones."""
_EVICTS_GATED = 3
"""One of so many evictions deletes a pod that waits behind its gate, if there is one."""
_USUAL = [kind for kind in FaultKind if kind is not FaultKind.WRONG_RESULT]
_MAY_STAY = (FaultKind.FREEZE_TASK, FaultKind.FREEZE_NODE, FaultKind.PARTITION_NODE)


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` and `other` choose tasks or nodes: positions in their lists, modulo the length.
    Where a fault has no second one, `other` is a random number for its details. `seconds`: how
    long it lasts, unless it `stays`: then another node comes instead."""

    at: float
    kind: FaultKind
    target: int
    other: int
    seconds: float
    stays: bool = False

    @property
    def duration(self) -> str:
        return "ever" if self.stays else f"{self.seconds:4.1f} s"

    def __str__(self) -> str:
        return f"{self.at:5.2f} s for {self.duration}: {self.kind} ({self.target})"


def draw_faults(random: Random) -> list[Fault]:
    """In groups, because what happens at the same time is what is hard."""
    faults: list[Fault] = []
    kinds = random.sample(_USUAL, random.randint(2, len(_USUAL)))
    for _ in range(random.randint(2, 7)):
        begin = random.uniform(_FIRST_S, FAULTS_S)
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
    faults.sort(key=lambda f: f.at)
    if random.random() < 0.5:
        _let_last_stay(faults)
    return faults


def draw_input_faults(random: Random) -> list[Fault]:
    """Faults that take inputs from tasks for longer than these wait, also several at a time, and
    what happens meanwhile."""
    faults: list[Fault] = []
    for _ in range(random.randint(1, 4)):
        begin = random.uniform(12.0, FAULTS_S)
        for _ in range(random.choice((1, 1, 2, 3))):
            at, seconds = begin + random.uniform(0, GROUP_S), random.choice((4.0, 10.0, LONGEST_S))
            target, other = random.randrange(1000), random.randrange(1000)
            kind = random.choice(_INPUT_FAULTS)
            faults.append(
                Fault(round(at, 2), kind, target, other, round(seconds * random.uniform(0.5, 1), 2))
            )
        if random.random() < 0.5:
            at = round(begin + random.uniform(GROUP_S, LONGEST_S), 2)
            kind = random.choice(_DURING_FAILURES)
            faults.append(
                Fault(at, kind, random.randrange(1000), random.randrange(1000), seconds=3.0)
            )
    if random.random() < _FAILS_WHILE_CORRECTING:
        faults += _draw_slow_correction(random)
    return faults


def _draw_slow_correction(random: Random) -> list[Fault]:
    """An input is away; then a task corrects its output slowly, and a tentative epoch fails
    meanwhile."""
    away_at, target = round(random.uniform(12.0, FAULTS_S), 2), random.randrange(1000)
    back_at = away_at + LONGEST_S
    fails_at = round(back_at + random.uniform(0.5, GROUP_S), 2)
    return [
        Fault(away_at, FaultKind.STOP_TASK, random.randrange(1000), 0, LONGEST_S),
        Fault(back_at, FaultKind.SLOW_TASK, target, 0, LONGEST_S),
        Fault(fails_at, FaultKind.FAIL_TENTATIVE, target, 0, seconds=0.0),
    ]


def draw_wrong_results(random: Random) -> list[Fault]:
    """Beside other faults, or alone: a difference is found only while both replicas run. In half of
    the seeds something else fails while replicas disagree."""
    faults = [
        Fault(
            round(random.uniform(8.0, FAULTS_S), 2),
            FaultKind.WRONG_RESULT,
            random.randrange(1000),
            random.randrange(1000),
            seconds=0.0,
        )
        for _ in range(random.choice((1, 1, 2)))
    ]
    if random.random() < 0.5:
        at = round(faults[0].at + random.uniform(*_DISAGREEMENT_S), 2)
        kind, target = random.choice(_DURING_DISAGREEMENT), random.randrange(1000)
        faults.append(Fault(at, kind, target, other=random.randrange(1000), seconds=1.0))
    if random.random() < _EDITED_WHILE_WRONG:
        # The second replicas of an operator come before the wrong result, and go soon after it.
        begin, end = random.uniform(20.0, 30.0), random.uniform(*_DISAGREEMENT_S)
        at = round(max(_FIRST_S, faults[0].at - begin), 2)
        seconds = round(faults[0].at + end - at, 2)
        faults.append(Fault(at, FaultKind.EDIT_REPLICAS, random.randrange(1000), 0, seconds))
    return faults


def _let_last_stay(faults: list[Fault]) -> None:
    """Recovery must not wait for what never comes back. Only one stays, as there is only so much
    that may be lost for good."""
    found = [i for i, fault in enumerate(faults) if fault.kind in _MAY_STAY]
    if found:
        faults[found[-1]] = replace(faults[found[-1]], stays=True)


class Injector:
    """Begins and ends faults in a cluster. `log` gets a line for each. `silent`: the names of the
    nodes and tasks whose fault stays."""

    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._log = log
        self.silent: set[str] = set()

    def plan(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._scheduler.after(fault.at, partial(self._begin, fault))

    @staticmethod
    def ends_at(faults: Sequence[Fault]) -> float:
        """A fault that stays is over as soon as it has begun."""
        return max((f.at + (0.0 if f.stays else f.seconds) for f in faults), default=0.0)

    def _begin(self, fault: Fault) -> None:
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

    def _inject(self, fault: Fault) -> Injected:
        """What it hits, and what ends it."""
        injected = (
            self._inject_into_task(fault)
            or self._inject_into_node(fault)
            or self._inject_into_network(fault)
            or self._inject_into_control_plane(fault)
        )
        return injected or ("nothing there", None)

    def _inject_into_task(self, fault: Fault) -> Injected | None:
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
                if gated and fault.other % _EVICTS_GATED == 0:
                    name = gated[fault.target % len(gated)]
                    self._cluster.remove_pod(name)
                    return f"{name}, behind its gate", None
                self._cluster.evict(pod, by_force=bool(fault.other % 2))
                return key, None
            case FaultKind.WRONG_RESULT:
                return self._inject_wrong_result(fault)
            case FaultKind.FAIL_DONOR | FaultKind.FAIL_NEWCOMER:
                return self._inject_into_movement(fault)
        return None

    def _inject_wrong_result(self, fault: Fault) -> Injected:
        """`other` chooses what the replica computes if it computes the epoch again."""
        cluster, slots = self._cluster, Movements(self._cluster).replaceable()
        cluster.watch_wrong_results(self._log)
        if not slots:
            return "no replica has a Live partner", None
        pod = cluster.pods[slots[fault.target % len(slots)]]
        recurrence = list(Recurrence)[fault.other % len(Recurrence)]
        pod.wrong_result = pod.wrong_result or WrongResult(recurrence)
        what = f"{pod.slot.key} incarnation {pod.incarnation}, {pod.wrong_result.recurrence.name}"
        return what, None

    def _inject_into_movement(self, fault: Fault) -> Injected:
        """Lose a replica that has a partner; then let one party (donor or newcomer) fail of the
        session that moves the partner's state to the new pod."""
        cluster, movements = self._cluster, Movements(self._cluster)
        slots = movements.replaceable()
        if not slots:
            return "no replica has a Live partner", None
        lost = cluster.pods[slots[fault.target % len(slots)]]
        cluster.evict(lost, by_force=True)
        donates = fault.kind is FaultKind.FAIL_DONOR
        over_at, ends = self._scheduler.now + fault.seconds, list[Callable[[], None]]()

        def fail_party() -> None:
            party = movements.donor_for(lost.slot) if donates else movements.newcomer(lost.slot)
            if party is not None:
                self._log(f"{fault.kind}: {party.slot.key} incarnation {party.incarnation}")
                ends.append(self._fail_party(party, fault.other))

        def look() -> None:
            found = movements.donor_for(lost.slot) if donates else movements.newcomer(lost.slot)
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

    def _inject_into_node(self, fault: Fault) -> Injected | None:
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

    def _inject_into_network(self, fault: Fault) -> Injected | None:
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

    def _inject_into_control_plane(self, fault: Fault) -> Injected | None:
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

    def _inject_into_coordinator(self, fault: Fault) -> Injected | None:
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

    def _inject_into_operator(self, fault: Fault) -> Injected | None:
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
