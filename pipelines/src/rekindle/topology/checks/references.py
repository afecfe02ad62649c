"""Checks of the graph: inputs that do not exist, cycles, nodes that no query needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rekindle.errors import Problem
from rekindle.topology.graph import (
    Edges,
    edges_of,
    find_cycle,
    nodes_and_ancestors,
    nodes_with_paths,
)
from rekindle.topology.problems import nearest
from rekindle.topology.spec import OperatorSpec, TopologySpec


def check_references(spec: TopologySpec) -> Iterator[Problem]:
    """Unknown inputs, one cycle, unused nodes."""
    edges = edges_of(spec)
    unknown = list(_unknown_inputs(spec, edges))
    yield from unknown
    cycle = find_cycle(edges)
    if cycle:
        at = [o.name for o in spec.operators].index(cycle[0])
        what = f"the operators form a cycle: {' -> '.join([*cycle, cycle[0]])}"
        hint = "a topology must be acyclic; remove one of these inputs"
        yield Problem(f"spec.operators[{at}].inputs", "Cycle", what, hint)
    if not unknown:  # otherwise the input with the misspelt name looks unused
        yield from _unused(spec, edges, cycle)


def _unknown_inputs(spec: TopologySpec, edges: Edges) -> Iterator[Problem]:
    for path, node in nodes_with_paths(spec):
        if isinstance(node, OperatorSpec):
            for at, name in enumerate(node.inputs):
                if name not in edges:
                    others = [n for n in edges if n != node.name]
                    yield _unknown(f"{path}.inputs[{at}]", name, others)
    for at, query in enumerate(spec.queries):
        if query.from_ not in edges:
            yield _unknown(f"spec.queries[{at}].from", query.from_, list(edges))


def _unused(spec: TopologySpec, edges: Edges, cycle: Sequence[str]) -> Iterator[Problem]:
    used = nodes_and_ancestors(edges, [q.from_ for q in spec.queries])
    for path, node in nodes_with_paths(spec):
        if node.name not in used and node.name not in cycle:
            what = f"no query needs {node.name}"
            yield Problem(path, "Unused", what, "add a query that reads it, or remove it")


def _unknown(path: str, name: str, known: list[str]) -> Problem:
    what = f"there is no source or operator {name}"
    return Problem(path, "UnknownInput", what, nearest(name, known))
