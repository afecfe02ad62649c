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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rekindle.knapsack.problem import KnapsackProblem
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity

_MAX_CONFINED = 12  # sets of nodes with rows of their own
_SIZES = 4  # of each resource, of which there are rows that count

Row = tuple[list[int], int]  # cost of each pod, capacity


def knapsack_of(
    priorities: Sequence[int],
    needs: Sequence[Iterable[str]],
    pods: Mapping[str, PodToPlace],
    capacity: Capacity,
) -> KnapsackProblem:
    """`needs`: by query, keys of `pods`. Items are the pods, in their order."""
    numbers = {key: number for number, key in enumerate(pods)}
    listed = list(pods.values())
    rows = [*_of_nodes(listed, capacity), *_of_shares(listed, capacity)]
    return KnapsackProblem(
        priorities,
        [sorted(numbers[key] for key in keys) for keys in needs],
        [costs for costs, _ in rows],
        [limit for _, limit in rows],
    )


def scarce_resources(pods: Iterable[PodToPlace], capacity: Capacity) -> frozenset[str]:
    """Of which all pods together request more than there is."""
    needed = _total(pod.requests for pod in pods)
    free = _total(node.free.clamped() for node in capacity.nodes.values())
    return frozenset(name for name, amount in needed.items() if amount > free[name])


def _of_nodes(pods: Sequence[PodToPlace], capacity: Capacity) -> list[Row]:
    memo: dict[tuple[object, ...], frozenset[str]] = {}
    confined = [_nodes_of(pod, capacity, memo) for pod in pods]
    often = Counter(confined)
    sets = sorted(often, key=lambda nodes: (-often[nodes], sorted(nodes)))[:_MAX_CONFINED]
    everywhere = frozenset().union(*often)
    rows = []
    for nodes in dict.fromkeys([everywhere, *sets]):
        inside = [pod if of <= nodes else None for pod, of in zip(pods, confined, strict=True)]
        rows += _of_set(inside, [capacity.nodes[name] for name in sorted(nodes)])
    return rows


def _nodes_of(
    pod: PodToPlace, capacity: Capacity, memo: dict[tuple[object, ...], frozenset[str]]
) -> frozenset[str]:
    """That take the pod as they are; other replicas are not considered."""
    shape = pod.shape
    if shape not in memo:
        alike = replace(pod, key="", group="", replica=0)
        memo[shape] = frozenset(n for n, node in capacity.nodes.items() if node.fits(alike))
    return memo[shape]


def _of_set(pods: Sequence[PodToPlace | None], nodes: Sequence[NodeCapacity]) -> list[Row]:
    rows = []
    free = [_amounts(node.free.clamped()) for node in nodes]
    requests = [_amounts(pod.requests) if pod is not None else {} for pod in pods]
    for resource in sorted({name for of in requests for name in of}):
        costs = [of.get(resource, 0) for of in requests]
        left = [of.get(resource, 0) for of in free]
        if sum(costs) > sum(left):
            rows.append((costs, sum(left)))
        sizes = Counter(cost for cost in costs if cost)
        largest = sorted(sizes, key=lambda size: (-size * sizes[size], size))[:_SIZES]
        for size in largest:
            counts = [cost // size for cost in costs]
            places = sum(amount // size for amount in left)
            if size > 1 and sum(counts) > places:
                rows.append((counts, places))
    return rows


def _of_shares(pods: Sequence[PodToPlace], capacity: Capacity) -> list[Row]:
    rows = []
    for namespace, share in capacity.share_left.items():
        left = _amounts(share.clamped())
        inside = [_amounts(p.requests) if p.namespace == namespace else {} for p in pods]
        for resource in sorted({name for of in inside for name in of}):
            costs = [of.get(resource, 0) for of in inside]
            rows.append((costs, left.get(resource, 0)))
    return rows


def _amounts(of: ResourceAmounts) -> dict[str, int]:
    named = {"cpu": of.cpu_m, "memory": of.memory, "pods": of.pods}
    return {name: amount for name, amount in (*named.items(), *of.others) if amount}


def _total(amounts: Iterable[ResourceAmounts]) -> Counter[str]:
    found = Counter[str]()
    for of, number in Counter(amounts).items():
        for name, amount in _amounts(of).items():
            found[name] += amount * number
    return found
