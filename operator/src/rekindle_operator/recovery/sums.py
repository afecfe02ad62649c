"""The plan as a set-union knapsack: sums that no packing onto nodes exceeds. Pure.

What the nodes have in all says too little: of two nodes with 3 CPUs each none has room for the
third pod of 2 CPUs. So there is a row for the sum of each resource over all nodes, over each set of
nodes that some pods are confined to, and over the share of each namespace; and for some sizes t a
row that counts each pod as ⌊request ÷ t⌋ and each node as ⌊free ÷ t⌋. Packing obeys all of them,
since ⌊a ÷ t⌋ + ⌊b ÷ t⌋ ≤ ⌊(a + b) ÷ t⌋. Rows that suffice for all pods are dropped.

Design: docs/design/recovery.md#plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import mul

from rekindle.knapsack.problem import KnapsackProblem
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity

_MAX_CONFINED = 12  # sets of nodes with rows of their own
_SIZES = 4  # of each resource, of which there are rows that count

Row = tuple[list[int], int]  # cost of each kind of pods, capacity


def knapsack_of(
    priorities: Sequence[int],
    needs: Sequence[Iterable[str]],
    pods: Mapping[str, PodToPlace],
    capacity: Capacity,
) -> KnapsackProblem:
    """`needs`: by query, keys of `pods`. Items are the pods, in their order."""
    items = {key: number for number, key in enumerate(pods)}
    kinds = _Kinds(pods.values())
    rows = [*_of_nodes(kinds, capacity), *_of_shares(kinds, capacity)]
    return KnapsackProblem(
        priorities,
        [sorted(items[key] for key in keys) for keys in needs],
        [[costs[kind] for kind in kinds.of] for costs, _ in rows],
        [limit for _, limit in rows],
    )


class _Kinds:
    """Pods that cost the same in each row, of which there are few: `pods`, one of each kind;
    `numbers`, how many there are; `of`, the kind of each pod."""

    def __init__(self, pods: Iterable[PodToPlace]) -> None:
        found: dict[object, int] = {}
        self.pods: list[PodToPlace] = []
        self.of: list[int] = []
        for pod in pods:
            kind = found.setdefault((pod.shape, pod.namespace), len(found))
            if kind == len(self.pods):
                self.pods.append(replace(pod, key="", group="", replica=0))
            self.of.append(kind)
        numbers = Counter(self.of)
        self.numbers = [numbers[kind] for kind in range(len(self.pods))]

    def total(self, costs: Sequence[int]) -> int:
        return sum(map(mul, costs, self.numbers))


def scarce_resources(pods: Iterable[PodToPlace], capacity: Capacity) -> frozenset[str]:
    """Of which all pods together request more than there is."""
    needed = _total(pod.requests for pod in pods)
    free = _total(node.free.clamped() for node in capacity.nodes.values())
    return frozenset(name for name, amount in needed.items() if amount > free[name])


def _of_nodes(kinds: _Kinds, capacity: Capacity) -> Iterator[Row]:
    nodes = capacity.nodes.items()
    confined = [frozenset(name for name, node in nodes if node.fits(pod)) for pod in kinds.pods]
    often = Counter[frozenset[str]]()
    for names, number in zip(confined, kinds.numbers, strict=True):
        often[names] += number
    sets = sorted(often, key=lambda names: (-often[names], sorted(names)))[:_MAX_CONFINED]
    everywhere = frozenset().union(*often)
    for names in dict.fromkeys([everywhere, *sets]):
        requests = [
            _amounts(pod.requests) if of <= names else {}
            for pod, of in zip(kinds.pods, confined, strict=True)
        ]
        yield from _of_set(kinds, requests, [capacity.nodes[name] for name in sorted(names)])


def _of_set(
    kinds: _Kinds, requests: Sequence[Mapping[str, int]], nodes: Sequence[NodeCapacity]
) -> Iterator[Row]:
    """`requests`: by kind, nothing for pods that may be elsewhere."""
    free = [_amounts(node.free.clamped()) for node in nodes]
    for resource in sorted({name for of in requests for name in of}):
        costs = [of.get(resource, 0) for of in requests]
        left = [of.get(resource, 0) for of in free]
        if kinds.total(costs) > sum(left):
            yield costs, sum(left)
        sizes = Counter[int]()
        for cost, number in zip(costs, kinds.numbers, strict=True):
            if cost > 1:
                sizes[cost] += number
        for size in sorted(sizes, key=lambda size: (-size * sizes[size], size))[:_SIZES]:
            counts = [cost // size for cost in costs]
            places = sum(amount // size for amount in left)
            if kinds.total(counts) > places:
                yield counts, places


def _of_shares(kinds: _Kinds, capacity: Capacity) -> Iterator[Row]:
    for namespace, share in capacity.share_left.items():
        left = _amounts(share.clamped())
        requests = [_amounts(p.requests) if p.namespace == namespace else {} for p in kinds.pods]
        for resource in sorted({name for of in requests for name in of}):
            yield [of.get(resource, 0) for of in requests], left.get(resource, 0)


def _amounts(of: ResourceAmounts) -> dict[str, int]:
    named = {"cpu": of.cpu_m, "memory": of.memory, "pods": of.pods}
    return {name: amount for name, amount in (*named.items(), *of.others) if amount}


def _total(amounts: Iterable[ResourceAmounts]) -> Counter[str]:
    found = Counter[str]()
    for of, number in Counter(amounts).items():
        for name, amount in _amounts(of).items():
            found[name] += amount * number
    return found
