"""The best set of queries that is found within some effort. Pure.

A few queries: all sets. Many: the greedy, with prices that are then corrected resource by resource,
from several starts, and exchanges (`search`). The result is never worth less than the greedy's, nor
than the best single query.

Design: docs/design/recovery.md#plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from rekindle.knapsack.greedy import Greedy, item_prices, scarcities
from rekindle.knapsack.problem import KnapsackProblem
from rekindle.knapsack.search import Accept, Search

_FEW = 10  # queries of which all sets are compared
_STEPS = (8.0, 3.0, 1.7, 1.3, 1.1)  # factors by which the price of a resource is tried
_FOR_PRICES, _FOR_STARTS = 0.3, 0.2  # parts of the effort
_ACCEPTS = 100  # sets that are offered


def solve(
    problem: KnapsackProblem,
    effort: int,
    accept: Accept | None = None,
    start: Sequence[int] = (),
) -> list[int]:
    """Queries in the order in which to start them. `effort`: in units of about a microsecond; the
    first greedy run is made in any case. `accept`: whether a set that fits can be had; it is asked
    of sets that are worth more than the best one before. `start`: a set that fits and can be had;
    the result is worth no less."""
    possible, kept = reduced(problem)

    def accept_possible(queries: Sequence[int]) -> bool:
        return accept is None or accept([possible[q] for q in queries])

    number_of = {query: number for number, query in enumerate(possible)}
    begin = [number_of[query] for query in start]
    solver = _Solver(kept, effort, accept and accept_possible, begin)
    return [possible[q] for q in solver.run()]


def reduced(problem: KnapsackProblem) -> tuple[list[int], KnapsackProblem]:
    """Of the queries that fit alone, which are listed; of scarce resources, with merged items."""
    possible = [q for q in range(len(problem.needs)) if problem.fits([q])]
    kept = KnapsackProblem(
        [problem.priorities[q] for q in possible],
        [problem.needs[q] for q in possible],
        problem.costs,
        problem.capacity,
    )
    return possible, kept.merged().scarce()


class _Solver:
    def __init__(
        self, problem: KnapsackProblem, effort: int, accept: Accept | None, start: list[int]
    ) -> None:
        self._problem, self._effort, self._accept = problem, effort, accept
        self._greedy = Greedy(problem)
        self._weights = [1.0] * len(problem.costs)
        self._best = start
        self._asked = 0

    def run(self) -> list[int]:
        problem = self._problem
        self._offer(self._run_greedy(self._weights))
        if self._offer(self._run_greedy(scarcities(problem))):
            self._weights = scarcities(problem)
        if not problem.costs or len(self._best) == len(problem.needs):
            return self._best
        if len(problem.needs) <= _FEW:
            self._compare_all_sets()
        else:
            self._begin_with_the_best_single()
            self._correct_prices(self._effort * (1 - _FOR_PRICES))
            self._try_starts(self._effort * (1 - _FOR_STARTS))
            if self._effort > 0:
                search = Search(problem, self._weights, self._accept)
                self._best = search.run(self._best, self._effort)
        order = self._run_greedy(self._weights, self._best)
        return order if self._accept is None else [q for q in order if q in set(self._best)]

    def _run_greedy(self, weights: Sequence[float], first: Sequence[int] = ()) -> list[int]:
        self._effort -= self._greedy.effort_of_run
        return self._greedy.run(item_prices(self._problem, weights), first)

    def _offer(self, queries: list[int]) -> bool:
        """Whether it is the best one so far."""
        if self._problem.worth(queries) <= self._problem.worth(self._best):
            return False
        if self._accept is not None:
            self._asked += 1
            if self._asked > _ACCEPTS or not self._accept(queries):
                return False
        self._best = queries
        return True

    def _compare_all_sets(self) -> None:
        for queries in _sets_by_worth(self._problem):
            if self._problem.worth(queries) <= self._problem.worth(self._best):
                return
            if self._problem.fits(queries) and self._offer(queries):
                return

    def _begin_with_the_best_single(self) -> None:
        problem = self._problem
        singles = sorted(range(len(problem.needs)), key=lambda q: (-problem.priorities[q], q))
        for query in singles:
            if problem.priorities[query] < problem.worth(self._best)[0]:
                return
            first = [query]
            if self._offer(self._run_greedy(self._weights, first)) or self._offer(first):
                return

    def _correct_prices(self, until: float) -> None:
        """One resource after the other."""
        for step in _STEPS if len(self._weights) > 1 else ():
            for resource in range(len(self._weights)):
                for factor in (step, 1 / step):
                    if self._effort <= until:
                        return
                    weights = list(self._weights)
                    weights[resource] *= factor
                    if self._offer(self._run_greedy(weights)):
                        self._weights = weights
                        break

    def _try_starts(self, until: float) -> None:
        """The most important queries that the best set lacks, alone and with one or two others."""
        problem, best = self._problem, set(self._best)
        lacking = [q for q in range(len(problem.needs)) if q not in best]
        lacking.sort(key=lambda q: (-problem.priorities[q], q))
        starts: list[tuple[int, ...]] = [(q,) for q in lacking[:12]]
        starts += [g for n in (2, 3) for g in combinations(lacking[:5], n) if problem.fits(g)]
        for first in starts:
            if self._effort <= until:
                return
            self._offer(self._run_greedy(self._weights, first))


def _sets_by_worth(problem: KnapsackProblem) -> Iterator[list[int]]:
    queries = range(len(problem.needs))
    sets = [list(of) for n in range(len(queries), 0, -1) for of in combinations(queries, n)]
    yield from sorted(sets, key=problem.worth, reverse=True)
