"""A set-union knapsack in integers. Pure.

Paper: Progressive recovery (Su and Zhou 2017), section 5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnapsackProblem:
    """Queries, items and resources are numbered from 0. Costs are integers, so that no sum depends
    on its order and no capacity is exceeded by rounding."""

    priorities: Sequence[int]  # by query, not negative
    needs: Sequence[Sequence[int]]  # by query: its items, ascending
    costs: Sequence[Sequence[int]]  # by resource: of each item, not negative
    capacity: Sequence[int]  # by resource, not negative

    @property
    def items(self) -> int:
        return 1 + max((need[-1] for need in self.needs if need), default=-1)

    def users(self) -> list[list[int]]:
        """The queries that need each item."""
        found: list[list[int]] = [[] for _ in range(self.items)]
        for query, needs in enumerate(self.needs):
            for item in needs:
                found[item].append(query)
        return found

    def union(self, queries: Iterable[int]) -> set[int]:
        return {item for query in queries for item in self.needs[query]}

    def used(self, items: Collection[int]) -> list[int]:
        """What they cost, by resource."""
        return [sum(map(of.__getitem__, items)) for of in self.costs]

    def fits(self, queries: Iterable[int]) -> bool:
        used = self.used(self.union(queries))
        return all(u <= c for u, c in zip(used, self.capacity, strict=True))

    def worth(self, queries: Collection[int]) -> tuple[int, int]:
        """The sum of priorities; of equal sums, more queries are better."""
        return sum(self.priorities[q] for q in queries), len(queries)

    def scarce(self) -> KnapsackProblem:
        """The same without resources that suffice for all items: they decide nothing."""
        used = self.used(self.union(range(len(self.needs))))
        short = [r for r, amount in enumerate(used) if amount > self.capacity[r]]
        costs, capacity = [self.costs[r] for r in short], [self.capacity[r] for r in short]
        return KnapsackProblem(self.priorities, self.needs, costs, capacity)

    def merged(self) -> KnapsackProblem:
        """The same with one item for all that the same queries need, such as the partitions of an
        operator; without items that nobody needs."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for item, users in enumerate(self.users()):
            if users:
                alike.setdefault(tuple(users), []).append(item)
        needs: list[list[int]] = [[] for _ in self.needs]
        for number, queries in enumerate(alike):
            for query in queries:
                needs[query].append(number)
        costs = [[sum(map(of.__getitem__, items)) for items in alike.values()] for of in self.costs]
        return KnapsackProblem(self.priorities, needs, costs, self.capacity)
