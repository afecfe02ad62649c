"""A set of queries, what it costs, and what it would cost with one more or one fewer. Pure.

Sets of items are bit masks, so that unions of large sets are cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

from rekindle.knapsack.problem import KnapsackProblem

Amounts = tuple[int, ...]  # by resource


class MaskCosts:
    """What the items of a mask cost, by resource: a sum over planes, each the mask of all items
    that cost one amount or, where there are many amounts, whose cost has one bit."""

    def __init__(self, costs: Sequence[Sequence[int]]) -> None:
        self._planes = [_planes(of) for of in costs]
        words = 1 + max((mask.bit_length() for p in self._planes for _, mask in p), default=0) // 64
        self.effort = sum(len(p) for p in self._planes) * (1 + words // 16)
        """Of one call, in units of about a microsecond."""

    def of(self, mask: int) -> Amounts:
        return tuple(
            [sum([f * (mask & plane).bit_count() for f, plane in p]) for p in self._planes]
        )


def _planes(costs: Sequence[int]) -> list[tuple[int, int]]:
    divisor = gcd(*costs) or 1
    amounts = sorted({cost // divisor for cost in costs if cost})
    bits = amounts[-1].bit_length() if amounts else 0
    if len(amounts) <= bits:
        by_amount = {a: bytearray(len(costs)) for a in amounts}
        for item, cost in enumerate(costs):
            if cost:
                by_amount[cost // divisor][item] = 1
        return [(a * divisor, mask_of_flags(flags)) for a, flags in by_amount.items()]
    planes = (bytearray(cost // divisor >> bit & 1 for cost in costs) for bit in range(bits))
    return [(divisor << bit, mask_of_flags(flags)) for bit, flags in enumerate(planes)]


def mask_of_flags(flags: bytearray) -> int:
    """Bit i is set where byte i is 1."""
    if not flags:
        return 0
    return int(flags.translate(_DIGITS)[::-1], 2)


_DIGITS = bytes([48, 49]) + bytes(range(2, 256))


def mask_of(items: Iterable[int], number: int) -> int:
    flags = bytearray(number)
    for item in items:
        flags[item] = 1
    return mask_of_flags(flags)


class Selection:
    """Queries that are chosen. `change`: of each query what the use would change by if it were
    chosen, or were no longer: brought up to date by `refresh`."""

    def __init__(
        self, problem: KnapsackProblem, masks: Sequence[int], mask_costs: MaskCosts
    ) -> None:
        self._masks, self._mask_costs = masks, mask_costs
        self.chosen: dict[int, None] = {}  # in the order in which they were added
        self.used: Amounts = (0,) * len(problem.costs)
        self.once = self.twice = 0  # items that one, or more, of the chosen queries need
        self.change = [mask_costs.of(mask) for mask in masks]
        self.effort = len(masks) * mask_costs.effort
        self._stale_once = self._stale_twice = 0
        self._stale = set[int]()

    def add(self, query: int) -> None:
        mask = self._masks[query]
        new, again = mask & ~self.once, mask & self.once & ~self.twice
        self._use(self._mask_costs.of(new), 1)
        self.once |= mask
        self.twice |= again
        self._changed(query, new, again)
        self.chosen[query] = None

    def drop(self, query: int) -> None:
        del self.chosen[query]
        mask = self._masks[query]
        once = twice = 0
        for other in self.chosen:
            if common := self._masks[other] & mask:
                twice |= once & common
                once |= common
        self._use(self._mask_costs.of(mask & ~once), -1)
        self._changed(query, mask & ~once, mask & self.twice & ~twice)
        self.once &= ~mask | once
        self.twice &= ~mask | twice

    def _use(self, amounts: Amounts, sign: int) -> None:
        self.used = tuple([u + sign * a for u, a in zip(self.used, amounts, strict=True)])

    def _changed(self, query: int, once: int, twice: int) -> None:
        self._stale_once |= once
        self._stale_twice |= twice
        self._stale.add(query)

    def refresh(self) -> None:
        of, chosen = self._mask_costs.of, self.chosen
        for query, mask in enumerate(self._masks):
            if query in chosen:
                if mask & self._stale_twice or mask & self._stale_once or query in self._stale:
                    self.change[query] = of(mask & ~self.twice)
                    self.effort += self._mask_costs.effort
            elif mask & self._stale_once or query in self._stale:
                self.change[query] = of(mask & ~self.once)
                self.effort += self._mask_costs.effort
        self.effort += len(self._masks)
        self._stale_once = self._stale_twice = 0
        self._stale.clear()

    def added_by(self, query: int) -> Amounts:
        self.effort += self._mask_costs.effort
        return self._mask_costs.of(self._masks[query] & ~self.once)

    def freed_by(self, query: int, beside: int) -> Amounts:
        """By dropping a chosen query once the query `beside` is chosen too."""
        self.effort += self._mask_costs.effort
        return self._mask_costs.of(self._masks[query] & ~self.twice & ~self._masks[beside])
