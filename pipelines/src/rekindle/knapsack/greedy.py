"""The densest query first, with prices for what is scarce. Pure.

The density of a query is its priority ÷ Σ over its missing items (price ÷ queries that need the
item). An item's price is the sum of what it costs of each resource, as a fraction of the capacity,
weighted by how scarce that resource is: what is not scarce costs nothing. Densities only grow as
items are taken, so a heap is corrected for those queries alone that need one of them.

Paper: Progressive recovery (Su and Zhou 2017), section 5 (PD_i, with one resource).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from rekindle.knapsack.problem import KnapsackProblem

UNIT = 1 << 40  # of prices: integers, whose sums do not depend on their order

Place = Callable[[int, Sequence[int]], bool]
"""Of a query and its missing items: whether they were placed."""


def scarcities(problem: KnapsackProblem) -> list[float]:
    """Of each resource, how many times its capacity all queries need; 0 if that is at most once,
    unless no resource is scarce."""
    used = problem.used(problem.union(range(len(problem.needs))))
    ratios = [u / max(c, 1) for u, c in zip(used, problem.capacity, strict=True)]
    scarce = [ratio if ratio > 1 else 0.0 for ratio in ratios]
    return scarce if any(scarce) else [1.0] * len(ratios)


def item_prices(problem: KnapsackProblem, weights: Sequence[float]) -> list[int]:
    total = [0.0] * problem.items
    for costs, capacity, weight in zip(problem.costs, problem.capacity, weights, strict=True):
        if weight > 0:
            by_cost = {c: c * weight / max(capacity, 1) for c in set(costs)}
            total = [t + by_cost[c] for t, c in zip(total, costs, strict=False)]
    return [int(t * UNIT) for t in total]


class Greedy:
    """Of one problem, with the index of who needs what."""

    def __init__(self, problem: KnapsackProblem) -> None:
        self._problem = problem
        self._users = problem.users()
        self.effort_of_run = 10 * len(problem.needs) + 2 * sum(map(len, problem.needs))
        """In units of about a microsecond."""

    def run(
        self, prices: Sequence[int], first: Sequence[int] = (), place: Place | None = None
    ) -> list[int]:
        """Queries in the order in which they are taken."""
        return [query for query, _ in self.steps(prices, first, place)]

    def steps(
        self, prices: Sequence[int], first: Sequence[int] = (), place: Place | None = None
    ) -> Iterator[tuple[int, float]]:
        """Each query that is taken, and its density then. `prices`: of items (`item_prices`).
        `first`: those to try before the densest. `place`: what else has to be possible."""
        problem, users = self._problem, self._users
        shares = [price // max(len(u), 1) for price, u in zip(prices, users, strict=True)]
        shared = [sum(map(shares.__getitem__, needs)) for needs in problem.needs]
        alone = [sum(map(prices.__getitem__, needs)) for needs in problem.needs]
        versions = [0] * len(problem.needs)
        is_ahead = [False] * len(problem.needs)
        for query in first:
            is_ahead[query] = True

        def entry(query: int) -> tuple[bool, float, int, int, int, int]:
            priority, cost = problem.priorities[query], shared[query]
            density = priority * UNIT / cost if cost else inf
            ahead, version = not is_ahead[query], versions[query]
            return ahead, -density, -priority, alone[query], query, version

        heap = [entry(query) for query in range(len(problem.needs))]
        heapify(heap)
        left, present = list(problem.capacity), bytearray(problem.items)
        taken = [False] * len(problem.needs)
        while heap:
            _, density, *_, query, version = heappop(heap)
            if taken[query] or version != versions[query]:
                continue
            missing = [item for item in problem.needs[query] if not present[item]]
            costs = problem.used(missing)
            if any(c > has for c, has in zip(costs, left, strict=True)):
                continue  # unless it lacks less later, and then it has another entry
            if place is not None and not place(query, missing):
                continue
            taken[query] = True
            yield query, -density
            left = [has - c for has, c in zip(left, costs, strict=True)]
            changed = set()
            for item in missing:
                present[item] = 1
                share, price = shares[item], prices[item]
                for user in users[item]:
                    shared[user] -= share
                    alone[user] -= price
                changed.update(users[item])
            for user in changed:
                if not taken[user]:
                    versions[user] += 1
                    heappush(heap, entry(user))
