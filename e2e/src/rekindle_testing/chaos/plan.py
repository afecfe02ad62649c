"""The faults of a chaos run and their times: pure data, generated from a seed.

The same seed gives the same plan, and a round is the same however many rounds follow it, so that
`SEED= ROUNDS=` of a failure replays it. Nodes are named in advance: the cluster numbers them in the
order in which they start. Pods are not, since the scheduler places them: a step names a topology,
and for a task an index, taken modulo the tasks that are there. Times are seconds since the round
began.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

FAULTS_BEGIN_BY_S = 15.0
FAULTS_END_BY_S = 35.0
MAX_API_PAUSE_S = 8.0
MAX_STORE_LOSS_S = 12.0
_MIN_FAULTS, _MAX_FAULTS = 3, 5


@dataclass(frozen=True, slots=True)
class KillTask:
    """SIGKILL every process of a task's pod."""

    topology: str
    index: int


@dataclass(frozen=True, slots=True)
class KillCoordinator:
    topology: str


@dataclass(frozen=True, slots=True)
class KillLeader:
    """SIGKILL the operator's replica that holds the Lease."""


@dataclass(frozen=True, slots=True)
class KillNodes:
    """SIGKILL all processes of these nodes at once; their disks are gone."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AddNode:
    node: str


@dataclass(frozen=True, slots=True)
class DeleteNodeObject:
    """Delete the Node object of a dead node, as a cloud's node controller does."""

    node: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP to all processes of a node: connections stay open and there are no responses."""

    node: str


@dataclass(frozen=True, slots=True)
class Thaw:
    """SIGCONT to all processes of a frozen node."""

    node: str


@dataclass(frozen=True, slots=True)
class PartitionNetwork:
    """A network partition: the node's processes continue and still reach the shared volume, which
    has inputs, sinks and checkpoints."""

    node: str


@dataclass(frozen=True, slots=True)
class HealNetwork:
    node: str


@dataclass(frozen=True, slots=True)
class RemoveStore:
    """The checkpoint store's directory is gone for a while."""

    topology: str


@dataclass(frozen=True, slots=True)
class RestoreStore:
    topology: str


@dataclass(frozen=True, slots=True)
class PauseApiServer:
    """SIGSTOP: connections stay open and there are no responses."""


@dataclass(frozen=True, slots=True)
class ResumeApiServer:
    pass


FaultAction = (
    KillTask
    | KillCoordinator
    | KillLeader
    | KillNodes
    | AddNode
    | DeleteNodeObject
    | Freeze
    | Thaw
    | PartitionNetwork
    | HealNetwork
    | RemoveStore
    | RestoreStore
    | PauseApiServer
    | ResumeApiServer
)


@dataclass(frozen=True, slots=True)
class ChaosStep:
    """One fault, or its end, at a time of its round."""

    at_s: float
    action: FaultAction

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s  {self.action}"


@dataclass(frozen=True, slots=True)
class Round:
    """Steps by time; after the last one every fault has ended and the cluster has as many nodes as
    at the start."""

    number: int
    steps: tuple[ChaosStep, ...]


class Fault(Enum):
    """Kinds of faults: what `FAULTS=` takes, and docs/chaos.md lists."""

    TASK = "task"
    NODES = "nodes"
    COORDINATOR = "coordinator"
    LEADER = "leader"
    FREEZE = "freeze"
    NETWORK_PARTITION = "network-partition"
    STORE = "store"
    API_SERVER = "api-server"


# Relative frequencies (default 1): losses most often, since recovery is for them.
_WEIGHTS = {Fault.NODES: 4.0, Fault.TASK: 2.0, Fault.FREEZE: 1.5, Fault.NETWORK_PARTITION: 1.5}


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The faults of one seed. `node_objects_stay`: Node objects of dead nodes are never deleted, as
    on premises; otherwise they are deleted after some seconds, and new nodes may get their
    addresses, as in a cloud."""

    seed: int
    node_objects_stay: bool
    rounds: tuple[Round, ...]

    def __str__(self) -> str:
        stay = "stay" if self.node_objects_stay else "are deleted after some seconds"
        lines = [f"seed {self.seed}: Node objects of dead nodes {stay}"]
        for round in self.rounds:
            lines.append(f"round {round.number}")
            lines += [f"  {step}" for step in round.steps]
        return "\n".join(lines)


def make_plan(
    seed: int,
    rounds: int,
    *,
    nodes: int,
    topologies: Sequence[str],
    faults: Sequence[Fault] = tuple(Fault),
) -> ChaosPlan:
    """The plan of a seed, for a cluster of `nodes` nodes, of these kinds of faults only."""
    node_objects_stay = seed % 2 == 1
    alive = [f"node-{n}" for n in range(1, nodes + 1)]
    next_number = nodes + 1
    planned = []
    for number in range(1, rounds + 1):
        generator = _RoundGenerator(
            random.Random(f"{seed}/{number}"), alive, topologies, node_objects_stay
        )
        steps = generator.generate(faults, next_number)
        planned.append(Round(number, steps))
        added = [s.action.node for s in steps if isinstance(s.action, AddNode)]
        next_number += len(added)
        alive = [n for n in alive if n not in generator.dead] + added
    return ChaosPlan(seed, node_objects_stay, tuple(planned))


class _RoundGenerator:
    """Generates one round. One node has no fault; no other node has two, except that a frozen or
    partitioned one may be killed. A store is removed at most once, and so is the API server paused.
    """

    def __init__(
        self,
        rng: random.Random,
        alive: Sequence[str],
        topologies: Sequence[str],
        node_objects_stay: bool,
    ) -> None:
        self._rng = rng
        self._topologies = topologies
        self._node_objects_stay = node_objects_stay
        self._never_faulty = rng.choice(alive)
        self._may_still_fail = [n for n in alive if n != self._never_faulty]
        self._silent_nodes: dict[str, tuple[float, float]] = {}
        self._interrupted: set[str] = set()
        self._steps: list[ChaosStep] = []
        self.dead: set[str] = set()

    def generate(self, faults: Sequence[Fault], next_number: int) -> tuple[ChaosStep, ...]:
        count = self._rng.randint(_MIN_FAULTS, _MAX_FAULTS)
        weights = [_WEIGHTS.get(fault, 1.0) for fault in faults]
        for fault in self._rng.choices(faults, weights, k=count):
            self._add(fault, round(self._rng.uniform(0, FAULTS_BEGIN_BY_S), 1))
        self._replace_dead(next_number)
        return tuple(sorted(self._steps, key=lambda step: step.at_s))

    def _add(self, fault: Fault, at_s: float) -> None:
        match fault:
            case Fault.TASK:
                name, index = self._rng.choice(self._topologies), self._rng.randrange(100)
                self._step(at_s, KillTask(name, index))
            case Fault.COORDINATOR:
                self._step(at_s, KillCoordinator(self._rng.choice(self._topologies)))
            case Fault.LEADER:
                self._step(at_s, KillLeader())
            case Fault.NODES:
                self._kill_nodes(at_s)
            case Fault.FREEZE:
                self._make_silent(at_s, Freeze, Thaw)
            case Fault.NETWORK_PARTITION:
                self._make_silent(at_s, PartitionNetwork, HealNetwork)
            case Fault.STORE:
                name = self._rng.choice(self._topologies)
                self._interrupt(at_s, MAX_STORE_LOSS_S, RemoveStore(name), RestoreStore(name))
            case Fault.API_SERVER:
                self._interrupt(at_s, MAX_API_PAUSE_S, PauseApiServer(), ResumeApiServer())
            case _:
                assert_never(fault)

    def _step(self, at_s: float, action: FaultAction) -> None:
        self._steps.append(ChaosStep(round(at_s, 1), action))

    def _interrupt(
        self, at_s: float, longest_s: float, begin: FaultAction, end: FaultAction
    ) -> None:
        if str(begin) not in self._interrupted:
            self._interrupted.add(str(begin))
            self._step(at_s, begin)
            self._step(at_s + self._rng.uniform(2, longest_s), end)

    def _make_silent(
        self, at_s: float, begin: type[Freeze | PartitionNetwork], end: type[Thaw | HealNetwork]
    ) -> None:
        if self._may_still_fail:
            node = self._may_still_fail.pop(self._rng.randrange(len(self._may_still_fail)))
            until_s = round(at_s + self._rng.uniform(2, 18), 1)
            self._silent_nodes[node] = at_s, until_s
            self._step(at_s, begin(node))
            self._step(until_s, end(node))

    def _kill_nodes(self, at_s: float) -> None:
        """One node, two, or most of them."""
        candidates = self._may_still_fail + [
            n for n, (since_s, _) in self._silent_nodes.items() if since_s < at_s
        ]
        if not candidates:
            return
        count = self._rng.choices((1, 2, len(candidates)), weights=(4, 2, 4))[0]
        victims = self._rng.sample(candidates, min(count, len(candidates)))
        for node in victims:
            if node in self._may_still_fail:
                self._may_still_fail.remove(node)
            self._silent_nodes.pop(node, None)
        self.dead.update(victims)
        self._steps = [s for s in self._steps if not _ends_fault_of(s, victims, at_s)]
        self._step(at_s, KillNodes(tuple(sorted(victims))))

    def _replace_dead(self, next_number: int) -> None:
        losses = [(s.at_s, s.action.nodes) for s in self._steps if isinstance(s.action, KillNodes)]
        arrivals = []
        for at_s, nodes in losses:
            for node in nodes:
                arrivals.append(round(at_s + self._rng.uniform(3, 15), 1))
                deleted_s = at_s + self._rng.uniform(2, FAULTS_END_BY_S - FAULTS_BEGIN_BY_S)
                if not self._node_objects_stay:
                    self._step(deleted_s, DeleteNodeObject(node))
        for number, at_s in enumerate(sorted(arrivals), next_number):
            self._step(at_s, AddNode(f"node-{number}"))


def _ends_fault_of(step: ChaosStep, victims: Sequence[str], since_s: float) -> bool:
    node = step.action.node if isinstance(step.action, Thaw | HealNetwork) else ""
    return step.at_s > since_s and node in victims
