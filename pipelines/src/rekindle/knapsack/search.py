"""Better sets of queries by exchanges. Pure, and bounded by its work, never by time.

From a set that fits: a query is chosen for which there is no room, and others leave for it, one of
them or all users of some items. The first exchange that gains is made; if none does, the one that
loses least. What it undoes is forbidden for some exchanges (tabu search). Where that finds nothing,
the search goes on from the best set without the queries that need one of its items. Equal inputs
give equal results on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from rekindle.knapsack.problem import KnapsackProblem
from rekindle.knapsack.selection import Amounts, MaskCosts, Selection, mask_of

_TENURE = 7  # exchanges for which a query that left is not chosen again; half as many it stays
_STALLED = 12  # exchanges without a better set, after which the search begins from the best one
_RANKED_FOR = 8  # exchanges for which the order of items is used
_NOT_ACCEPTED = 64  # by which part of it the capacity falls where a set was not accepted

Accept = Callable[[Sequence[int]], bool]
"""Whether a set can be had besides its costs."""


class Search:
    """`weights`: of resources, by how scarce they are."""

    def __init__(
        self, problem: KnapsackProblem, weights: Sequence[float], accept: Accept | None = None
    ) -> None:
        self._problem, self._accept = problem, accept
        self._masks = [mask_of(needs, problem.items) for needs in problem.needs]
        self._users = [mask_of(users, len(self._masks)) for users in problem.users()]
        self._value = MaskCosts([problem.priorities])
        self._selection = Selection(problem, self._masks, MaskCosts(problem.costs))
        self._capacity: Amounts = tuple(problem.capacity)
        self._prices = [w / max(c, 1) for w, c in zip(weights, problem.capacity, strict=True)]
        costs_of_items = zip(*problem.costs, strict=True)
        self._item_prices = [
            sum(p * c for p, c in zip(self._prices, costs, strict=True))
            for costs, _ in zip(costs_of_items, self._users, strict=False)
        ]
        self._loss = [0] * len(self._users)  # priorities of the chosen queries that need the item
        self._ranked_items: list[int] = []
        self._ranked_at = -_RANKED_FOR
        self._free_from = [0] * len(self._masks)  # the exchange from which it may change
        self._without_gain = set[int]()  # queries for which no exchange gained since it was empty
        self._exchanges = 0
        self._effort = 0

    @property
    def effort(self) -> int:
        """So far, in units of about a microsecond."""
        return self._effort + self._selection.effort

    def run(self, start: Sequence[int], effort: int) -> list[int]:
        """The best set that was found, in the order in which its queries were chosen. `start` fits
        and is accepted."""
        problem, selection = self._problem, self._selection
        for query in start:
            self._add(query)
        self._free_from = [0] * len(self._masks)
        best, worth, stalled, restarts = list(start), problem.worth(start), 0, 0
        while self.effort < effort:
            self._exchanges += 1
            if stalled < _STALLED and self._exchange():
                stalled += 1
            else:
                self._restart(best, restarts)
                stalled, restarts = 0, restarts + 1
            self._fill()
            found = list(selection.chosen)
            if problem.worth(found) <= worth:
                continue
            if self._accept is None or self._accept(found):
                best, worth, stalled, restarts = found, problem.worth(found), 0, 0
            else:
                self._capacity = tuple([c - c // _NOT_ACCEPTED for c in self._capacity])
                self._shrink()
        return best

    # --- one exchange ---

    def _exchange(self) -> bool:
        """False: there is none."""
        selection, priorities = self._selection, self._problem.priorities
        selection.refresh()
        now = self._exchanges
        chosen = [q for q in selection.chosen if self._free_from[q] <= now]
        if not chosen:
            return False
        by_priority = sorted(chosen, key=lambda q: (priorities[q], q))
        outside = [
            q
            for q in range(len(priorities))
            if q not in selection.chosen and self._free_from[q] <= now
        ]
        outside.sort(key=lambda q: (-self._ratio(q), q))
        self._effort += 2 * len(priorities)
        self._rank_items()
        chosen_mask = _mask_of_queries(selection.chosen)
        movable_mask = _mask_of_queries(chosen)
        # Without one that is chosen: the next exchange has more room.
        best_gain, best_query, best_leaving = -priorities[by_priority[0]], -1, by_priority[:1]
        for query in outside:
            if query in self._without_gain:
                continue
            leaving = self._leaving(
                query, by_priority, chosen_mask, movable_mask, priorities[query] - best_gain
            )
            if leaving is not None:
                best_gain = priorities[query] - sum(priorities[q] for q in leaving)
                best_query, best_leaving = query, leaving
                if best_gain > 0:
                    break
            self._without_gain.add(query)
        if best_gain <= 0:
            self._without_gain.clear()
        for other in best_leaving:
            self._drop(other)
        if best_query >= 0:
            self._add(best_query)
        self._shrink()
        return True

    def _leaving(
        self, query: int, by_priority: Sequence[int], chosen: int, movable: int, limit: float
    ) -> list[int] | None:
        """Which chosen queries leave for it, of less priority in all than `limit`; None: no such
        ones are found."""
        selection, priorities = self._selection, self._problem.priorities
        over = self._over(selection.change[query])
        if not any(over):
            return []
        found, change = None, selection.change
        first_short = next(r for r, amount in enumerate(over) if amount)
        least = over[first_short]
        for other in by_priority:
            if priorities[other] >= limit:
                break
            self._effort += 1
            # What it frees beside `query` is at most what it frees now.
            if change[other][first_short] >= least:
                freed = selection.freed_by(other, query)
                if all(f >= o for f, o in zip(freed, over, strict=True) if o):
                    found, limit = [other], priorities[other]
                    break
        users = self._users_leaving(query, over, chosen, movable, limit)
        return users if users is not None else found

    def _users_leaving(
        self, query: int, over: Sequence[int], chosen: int, movable: int, limit: float
    ) -> list[int] | None:
        """The users of items that are worth least for their price, until there is room."""
        lacks, leaving, mask = list(over), 0, self._masks[query]
        costs = self._problem.costs
        for item in self._ranked_items:
            if mask >> item & 1:
                continue
            users = self._users[item] & chosen
            if not users or users & ~movable:
                continue
            self._effort += 5
            if self._value.of(leaving | users)[0] >= limit:
                return None
            leaving |= users
            lacks = [lack - of[item] for lack, of in zip(lacks, costs, strict=True)]
            if max(lacks) <= 0:
                return [q for q in self._selection.chosen if leaving >> q & 1]
        return None

    def _rank_items(self) -> None:
        if self._exchanges - self._ranked_at < _RANKED_FOR:
            return
        self._ranked_at = self._exchanges
        loss, prices = self._loss, self._item_prices
        items = [i for i, value in enumerate(loss) if value and prices[i] > 0]
        self._ranked_items = sorted(items, key=lambda i: (loss[i] / prices[i], i))
        self._effort += len(loss)

    def _restart(self, best: Sequence[int], number: int) -> None:
        """From `best` without the queries that need one of its items, in turn those that are worth
        least for their price."""
        chosen, kept = self._selection.chosen, set(best)
        for query in [q for q in chosen if q not in kept]:
            self._drop(query)
        for query in best:
            if query not in chosen:
                self._add(query)
        self._free_from = [0] * len(self._masks)
        self._without_gain.clear()
        self._ranked_at = -_RANKED_FOR
        self._rank_items()
        if self._ranked_items:
            item = self._ranked_items[number % len(self._ranked_items)]
            for query in [q for q in best if self._masks[q] >> item & 1]:
                self._drop(query)

    # --- the set ---

    def _add(self, query: int) -> None:
        self._selection.add(query)
        self._free_from[query] = self._exchanges + 1 + _TENURE // 2
        self._count(query, self._problem.priorities[query])

    def _drop(self, query: int) -> None:
        self._selection.drop(query)
        self._free_from[query] = self._exchanges + 1 + _TENURE
        self._count(query, -self._problem.priorities[query])

    def _count(self, query: int, priority: int) -> None:
        for item in self._problem.needs[query]:
            self._loss[item] += priority
        self._effort += len(self._problem.needs[query]) // 16

    def _over(self, more: Amounts) -> list[int]:
        """What is lacking of each resource."""
        return [
            u + m - c if u + m > c else 0
            for u, m, c in zip(self._selection.used, more, self._capacity, strict=True)
        ]

    def _shrink(self) -> None:
        """Until the set fits: what leaves frees less where another query needs it too."""
        nothing = (0,) * len(self._capacity)
        while any(self._over(nothing)):
            self._selection.refresh()
            chosen = [q for q in self._selection.chosen if self._free_from[q] <= self._exchanges]
            candidates = chosen or list(self._selection.chosen)
            self._drop(min(candidates, key=lambda q: (self._ratio(q), q)))

    def _fill(self) -> None:
        """With what fits, the densest first."""
        selection, now = self._selection, self._exchanges
        while True:
            selection.refresh()
            left = [c - u for c, u in zip(self._capacity, selection.used, strict=True)]
            self._effort += len(self._masks) // 2
            fitting = [
                q
                for q, amounts in enumerate(selection.change)
                if amounts[0] <= left[0]
                and q not in selection.chosen
                and self._free_from[q] <= now
                and not any(self._over(amounts))
            ]
            if not fitting:
                return
            self._add(max(fitting, key=lambda q: (self._ratio(q), -q)))

    def _ratio(self, query: int) -> float:
        """Priority for each unit of what it would add, or frees."""
        cost = 0.0
        for price, amount in zip(self._prices, self._selection.change[query], strict=True):
            cost += price * amount
        return self._problem.priorities[query] / cost if cost > 0 else inf


def _mask_of_queries(queries: Sequence[int] | dict[int, None]) -> int:
    mask = 0
    for query in queries:
        mask |= 1 << query
    return mask
