"""What no set of queries can be worth more than. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rekindle.knapsack.problem import KnapsackProblem


def upper_bound(problem: KnapsackProblem) -> int:
    """By each resource alone: if the cost of an item is divided among all queries that need it, a
    set costs no less than the sum of the parts of its queries, and parts of queries are worth at
    most what a knapsack of parts holds."""
    users = [len(of) for of in problem.users()]
    total = sum(problem.priorities)
    bounds = (
        _of_resource(problem, costs, capacity, users)
        for costs, capacity in zip(problem.costs, problem.capacity, strict=True)
    )
    return min(bounds, default=total)


def _of_resource(
    problem: KnapsackProblem, costs: Sequence[int], capacity: int, users: Sequence[int]
) -> int:
    parts = [Fraction(0)] * len(costs)
    for item, number in enumerate(users):
        if number:
            parts[item] = Fraction(costs[item], number)
    left, value = Fraction(capacity), Fraction(0)
    entries = [
        (priority, sum((parts[i] for i in needs), Fraction(0)))
        for priority, needs in zip(problem.priorities, problem.needs, strict=True)
    ]
    entries.sort(key=lambda e: Fraction(e[0]) / e[1] if e[1] else Fraction(1 << 62), reverse=True)
    for priority, cost in entries:
        if cost <= left:
            left -= cost
            value += priority
        else:
            value += priority * left / cost
            break
    return int(value)
