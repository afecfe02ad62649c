"""The queries of Fig. 4 and the arrivals of nodes of Fig. 3. Pure: random by seed alone.

A source of 1,000 rows/s, a parser, four sliding windows of it, and 15 queries, the sink of each one
is an operator in five partitions. The text that we have names what reads the windows, but not which
windows each of them reads: here it is every set of two or more of the four, which are eleven, and
the windows are the sinks of the other four queries. Source and parser survive; the 75 partitions
with sinks are lost with eight of ten nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random

WINDOWS, PARALLELISM = 4, 5
NEW_NODES, SLOTS_OF_A_NODE = 8, 10
FIRST_S, LAST_S = 120.0, 360.0
"""Fig. 3: a node is attached after 2 to 6 minutes."""
BEST_CASE_S = 180.0
"""In the paper's best case all nodes come then."""


@dataclass(frozen=True, slots=True)
class LostQuery:
    name: str
    priority: int
    partitions: frozenset[str]  # that are lost, of its own operator and of the windows it reads


def lost_queries(priorities: list[int] | None = None) -> list[LostQuery]:
    """In the order of the numbers of their sinks. Default: all of the same priority."""
    windows = range(1, WINDOWS + 1)
    sets = [of for size in windows for of in combinations(windows, size)]
    found = []
    for number, of in enumerate(sets, start=1):
        operators = {*of, number}
        partitions = frozenset(name for each in operators for name in partitions_of(each))
        priority = priorities[number - 1] if priorities is not None else 1
        found.append(LostQuery(f"q{number}", priority, partitions))
    return found


def partitions_of(operator: int) -> list[str]:
    """Names sort in topological order, an operator's partitions together."""
    return [f"o{operator:02}/{number}" for number in range(PARALLELISM)]


def arrivals(random: Random, mode_s: float | None = None) -> tuple[float, ...]:
    """Seconds from the failure until each new node is Ready, in order. `mode_s`: of a triangular
    distribution; None: all times are equally likely."""
    times = (
        random.uniform(FIRST_S, LAST_S)
        if mode_s is None
        else random.triangular(FIRST_S, LAST_S, mode_s)
        for _ in range(NEW_NODES)
    )
    return tuple(sorted(times))
