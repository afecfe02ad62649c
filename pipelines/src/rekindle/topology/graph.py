"""The graph of a topology: topological order, cycles, ancestors, consumers. Pure functions.

Design: docs/design/compilation.md#segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rekindle.topology.spec import OperatorSpec, SourceSpec, TopologySpec

Edges = Mapping[str, tuple[str, ...]]
"""Node name -> names of its inputs."""


def nodes_with_paths(spec: TopologySpec) -> Iterator[tuple[str, SourceSpec | OperatorSpec]]:
    """(field path, node) of every source and operator, in the order of the resource."""
    for at, source in enumerate(spec.sources):
        yield f"spec.sources[{at}]", source
    for at, operator in enumerate(spec.operators):
        yield f"spec.operators[{at}]", operator


def edges_of(spec: TopologySpec) -> dict[str, tuple[str, ...]]:
    """Inputs of every node; of nodes with the same name, the first."""
    edges: dict[str, tuple[str, ...]] = {s.name: () for s in spec.sources}
    for operator in spec.operators:
        edges.setdefault(operator.name, operator.inputs)
    return edges


def topological_order(edges: Edges) -> list[str]:
    """Nodes after their inputs, otherwise in the given order; without nodes in a cycle or after
    one. Inputs that are not nodes are ignored."""
    order: list[str] = []
    placed: set[str] = set()
    waiting = list(edges)
    while waiting:
        ready = [n for n in waiting if all(i in placed or i not in edges for i in edges[n])]
        if not ready:
            break
        order += ready
        placed.update(ready)
        waiting = [n for n in waiting if n not in placed]
    return order


def find_cycle(edges: Edges) -> list[str]:
    """The nodes of one cycle, each an input of the next and the last of the first; [] if none."""
    ordered = set(topological_order(edges))
    left = [n for n in edges if n not in ordered]
    if not left:
        return []
    path: list[str] = [left[0]]
    while True:
        before = next(i for i in edges[path[-1]] if i in edges and i not in ordered)
        if before in path:
            cycle = list(reversed(path[path.index(before) :]))
            start = cycle.index(min(cycle, key=list(edges).index))
            return cycle[start:] + cycle[:start]
        path.append(before)


def nodes_and_ancestors(edges: Edges, names: Iterable[str]) -> set[str]:
    """The named nodes and all their direct and indirect inputs."""
    found: set[str] = set()
    to_visit = [n for n in names if n in edges]
    while to_visit:
        name = to_visit.pop()
        if name not in found:
            found.add(name)
            to_visit += [i for i in edges[name] if i in edges]
    return found


def consumers(edges: Edges) -> dict[str, tuple[str, ...]]:
    """The consumers of each node, in the order of the nodes."""
    return {name: tuple(n for n, inputs in edges.items() if name in inputs) for name in edges}
