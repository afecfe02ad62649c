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


def window_sets(windows: int = WINDOWS) -> list[tuple[int, ...]]:
    """What each query reads, in the order of the numbers of their sinks; first each window alone,
    whose sink is its own."""
    numbers = range(1, windows + 1)
    return [of for size in numbers for of in combinations(numbers, size)]


def lost_queries(
    priorities: list[int] | None = None, windows: int = WINDOWS, parallelism: int = PARALLELISM
) -> list[LostQuery]:
    """In the order of the numbers of their sinks. Default: all of the same priority."""
    found = []
    for number, of in enumerate(window_sets(windows), start=1):
        operators = {*of, number}
        partitions = frozenset(
            partition_name(each, at) for each in operators for at in range(parallelism)
        )
        priority = priorities[number - 1] if priorities is not None else 1
        found.append(LostQuery(f"q{number}", priority, partitions))
    return found


def partition_name(operator: int, partition: int) -> str:
    """Names sort in topological order, an operator's partitions together."""
    return f"o{operator:02}/{partition}"


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
