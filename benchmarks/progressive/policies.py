"""What is started when nodes have arrived, by policy. Pure.

`Progressive` and `Blocking` are the operator's planner. In topological order, and in none, are what
other systems do: a partition is started as soon as there is a slot, whatever queries need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Protocol

from plan_nodes import empty_nodes

from progressive.experiment import SLOTS_OF_A_NODE, LostQuery
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.plan import DownQuery, make_plan

SLOT = ResourceAmounts(200, 1 << 30, 1)

Nodes = Mapping[str, str]
"""By partition."""


class Policy(Protocol):
    slots: int  # of a node

    def place(self, placed: Nodes, nodes: Sequence[str]) -> Nodes:
        """The partitions that start now. `placed`: those that have started; `nodes`: all that have
        arrived."""


class Progressive:
    """The plan of a recovery; of equal states it is made once."""

    def __init__(self, queries: Sequence[LostQuery], slots: int = SLOTS_OF_A_NODE) -> None:
        self.slots = slots
        self._queries = queries
        self._plans: dict[tuple[frozenset[tuple[str, str]], tuple[str, ...]], Nodes] = {}

    def place(self, placed: Nodes, nodes: Sequence[str]) -> Nodes:
        key = frozenset(placed.items()), tuple(nodes)
        if key not in self._plans:
            down = [
                DownQuery(("ns/t", q.name), q.priority, missing)
                for q in self._queries
                if (missing := q.partitions - placed.keys())
            ]
            self._plans[key] = _plan(down, placed, nodes, self.slots)
        return self._plans[key]


class Blocking:
    """`recovery.mode: Blocking`: nothing before all fits."""

    def __init__(self, queries: Sequence[LostQuery], slots: int = SLOTS_OF_A_NODE) -> None:
        self.slots = slots
        self._needs = frozenset[str]().union(*(q.partitions for q in queries))

    def place(self, placed: Nodes, nodes: Sequence[str]) -> Nodes:
        missing = self._needs - placed.keys()
        if not missing:
            return {}
        return _plan([DownQuery(("ns/t", ""), 1, missing)], placed, nodes, self.slots)


class InOrder:
    """The first partitions for which there are slots."""

    def __init__(self, order: Sequence[str], slots: int = SLOTS_OF_A_NODE) -> None:
        self.slots = slots
        self._order = order

    def place(self, placed: Nodes, nodes: Sequence[str]) -> Nodes:
        used = Counter(placed.values())
        slots = [node for node in nodes for _ in range(self.slots - used[node])]
        missing = (name for name in self._order if name not in placed)
        return dict(zip(missing, slots, strict=False))


def best_values(queries: Sequence[LostQuery], slots: Sequence[int]) -> list[int]:
    """For each number of slots the highest sum of priorities of queries that fit: all sets are
    compared."""
    best = dict.fromkeys(slots, 0)
    for size in range(1, len(queries) + 1):
        for chosen in combinations(queries, size):
            cost = len(frozenset[str]().union(*(q.partitions for q in chosen)))
            value = sum(q.priority for q in chosen)
            for number in slots:
                if cost <= number and value > best[number]:
                    best[number] = value
    return [best[number] for number in slots]


def value_of(queries: Sequence[LostQuery], placed: Nodes) -> int:
    """The sum of the priorities of the queries of which no partition is missing."""
    return sum(q.priority for q in queries if q.partitions <= placed.keys())


def _plan(down: Sequence[DownQuery], placed: Nodes, nodes: Sequence[str], slots: int) -> Nodes:
    missing = frozenset[str]().union(*(query.needs for query in down))
    pods = {name: PodToPlace(name, SLOT, name, 0) for name in missing}
    capacity = empty_nodes(dict.fromkeys(nodes, SLOT.scaled(slots)))
    for name, node in placed.items():
        capacity = capacity.place(PodToPlace(name, SLOT, name, 0), node)
    return make_plan(down, pods, [], capacity).nodes
