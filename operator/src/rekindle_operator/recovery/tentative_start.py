"""Which parts of a query start before there is capacity for all of it. Pure.

A query that may have tentative results needs one whole path, from one of its sources to its sink.
The capacity that the plan has left over is given only to the paths of the query whose turn is next:
its tasks would get that capacity next in any case. A query with a task that no node takes is next
only if all that wait are such, and then comes after spare replicas: it would hold what others lack,
and never give it back. The paper of progressive recovery starts whole queries only, and that of DPC
has no plan.

Design: docs/design/recovery.md#tentative-start.
Papers: Progressive recovery (Su and Zhou 2017), section 5; DPC (Balazinska et al. 2005), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.pack import PackingRule, Placement, pack


def place_paths(
    paths: Sequence[frozenset[str]], pods: Mapping[str, PodToPlace], placement: Placement
) -> Placement:
    """Place as many of a query's paths as fit, those with the smallest requests first. `paths`:
    what is missing on each, keys of `pods`."""
    allocatable = placement.capacity.allocatable

    def cost(path: frozenset[str]) -> tuple[float, list[str]]:
        return sum(pods[need].requests.fraction_of(allocatable) for need in path), sorted(path)

    for path in sorted(paths, key=cost):
        missing = [pods[n] for n in sorted(path) if pods[n].key not in placement.nodes]
        placed = pack(missing, placement.capacity, PackingRule.TIGHT)
        if placed is not None:
            placement = Placement(placed.capacity, {**placement.nodes, **placed.nodes})
    return placement
