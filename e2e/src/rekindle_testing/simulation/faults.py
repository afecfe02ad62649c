"""The faults of a simulation: a list that is drawn from the seed.

Design: docs/simulation.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

_FIRST_S, FAULTS_S = 3.0, 60.0
"""When the first group of faults begins at the earliest, and the last one at the latest."""
GROUP_S = 3.0
"""The faults of a group begin within this time."""
LONGEST_S = 25.0


class FaultKind(StrEnum):
    CRASH_TASK = "a task's container is killed"
    STOP_TASK = "a task's container is killed, and starts only later"
    CRASH_ENGINE = "a task's engine dies"
    SLOW_TASK = "a task's engine is slow"
    FAIL_TASK = "a task's next call fails for good"
    FAIL_TENTATIVE = "a task's next tentative epoch fails"
    FREEZE_TASK = "a task is frozen"
    EVICT_TASK = "a task is evicted, or its pod deleted by force"
    FAIL_LENDER = "a replica is lost, and the partner that lends the next one its state fails"
    FAIL_NEWCOMER = "a replica is lost, and the one that borrows a state in its place fails"
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
    EDIT_TEMPLATE = "new pods of the topology are made from another template for a while"
    REFUSE_EDIT = "an edit of the topology is refused by a policy, or waits for a quota"
    DELETE_OBJECT = "an object of the topology that is not a pod is deleted"
    API_DOWN = "the API server is down"
    API_ERRORS = "the API server refuses and fails"
    STALL_WATCHES = "the watches of an operator are stalled"
    EXPIRE_WATCHES = "the versions of an operator's watches have expired"
    CRASH_OPERATOR = "the operator that leads is killed"
    FREEZE_OPERATOR = "the operator that leads is frozen"
    PARTITION_OPERATOR = "a network partition between the operator that leads and the API server"
    LOSE_REPLIES_TO_OPERATOR = "the API server's replies to the operator that leads are lost"


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
EVICTS_GATED = 3
"""One of so many evictions deletes a pod that waits behind its gate, if there is one."""
NOT_DRAWN = frozenset({FaultKind.EDIT_TEMPLATE})
"""Only in the fixed schedules (`schedules.py`)."""
_USUAL = [kind for kind in FaultKind if kind not in {FaultKind.WRONG_RESULT, *NOT_DRAWN}]
_MAY_STAY = (FaultKind.FREEZE_TASK, FaultKind.FREEZE_NODE, FaultKind.PARTITION_NODE)


@dataclass(frozen=True, slots=True)
class SimulatedFault:
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


def draw_faults(random: Random) -> list[SimulatedFault]:
    """In groups, because what happens at the same time is what is hard."""
    faults: list[SimulatedFault] = []
    kinds = random.sample(_USUAL, random.randint(2, len(_USUAL)))
    for _ in range(random.randint(2, 7)):
        begin = random.uniform(_FIRST_S, FAULTS_S)
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            faults.append(
                SimulatedFault(
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


def draw_input_faults(random: Random) -> list[SimulatedFault]:
    """Faults that take inputs from tasks for longer than these wait, also several at a time, and
    what happens meanwhile."""
    faults: list[SimulatedFault] = []
    for _ in range(random.randint(1, 4)):
        begin = random.uniform(12.0, FAULTS_S)
        for _ in range(random.choice((1, 1, 2, 3))):
            at, seconds = begin + random.uniform(0, GROUP_S), random.choice((4.0, 10.0, LONGEST_S))
            target, other = random.randrange(1000), random.randrange(1000)
            kind = random.choice(_INPUT_FAULTS)
            faults.append(
                SimulatedFault(
                    round(at, 2), kind, target, other, round(seconds * random.uniform(0.5, 1), 2)
                )
            )
        if random.random() < 0.5:
            at = round(begin + random.uniform(GROUP_S, LONGEST_S), 2)
            kind = random.choice(_DURING_FAILURES)
            faults.append(
                SimulatedFault(
                    at, kind, random.randrange(1000), random.randrange(1000), seconds=3.0
                )
            )
    if random.random() < _FAILS_WHILE_CORRECTING:
        faults += _draw_slow_correction(random)
    return faults


def _draw_slow_correction(random: Random) -> list[SimulatedFault]:
    """An input is away; then a task corrects its output slowly, and a tentative epoch fails
    meanwhile."""
    away_at, target = round(random.uniform(12.0, FAULTS_S), 2), random.randrange(1000)
    back_at = away_at + LONGEST_S
    fails_at = round(back_at + random.uniform(0.5, GROUP_S), 2)
    return [
        SimulatedFault(away_at, FaultKind.STOP_TASK, random.randrange(1000), 0, LONGEST_S),
        SimulatedFault(back_at, FaultKind.SLOW_TASK, target, 0, LONGEST_S),
        SimulatedFault(fails_at, FaultKind.FAIL_TENTATIVE, target, 0, seconds=0.0),
    ]


def draw_wrong_results(random: Random) -> list[SimulatedFault]:
    """Beside other faults, or alone: a difference is found only while both replicas run. In half of
    the seeds something else fails while replicas disagree."""
    faults = [
        SimulatedFault(
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
        faults.append(SimulatedFault(at, kind, target, other=random.randrange(1000), seconds=1.0))
    if random.random() < _EDITED_WHILE_WRONG:
        # The second replicas of an operator come before the wrong result, and go soon after it.
        begin, end = random.uniform(20.0, 30.0), random.uniform(*_DISAGREEMENT_S)
        at = round(max(_FIRST_S, faults[0].at - begin), 2)
        seconds = round(faults[0].at + end - at, 2)
        faults.append(
            SimulatedFault(at, FaultKind.EDIT_REPLICAS, random.randrange(1000), 0, seconds)
        )
    return faults


def _let_last_stay(faults: list[SimulatedFault]) -> None:
    """Recovery must not wait for what never comes back. Only one stays, as there is only so much
    that may be lost for good."""
    found = [i for i, fault in enumerate(faults) if fault.kind in _MAY_STAY]
    if found:
        faults[found[-1]] = replace(faults[found[-1]], stays=True)
