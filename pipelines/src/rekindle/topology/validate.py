"""All that is wrong with a topology, each with its field path: `validate`.

The API server checks shapes and single fields; this finds what needs the graph, the SQL or the list
of what this version supports. Without a cluster it is the only check, so it repeats the others.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rekindle.errors import Problem
from rekindle.topology.analysis import Analysis, analyse
from rekindle.topology.findings import nearest
from rekindle.topology.graph import Edges, ancestors, edges_of, find_cycle, nodes_with_paths
from rekindle.topology.settings import check_settings
from rekindle.topology.spec import OperatorSpec, TopologySpec
from rekindle.topology.unsupported import check_unsupported


def validate(spec: TopologySpec, name: str, *, local: bool = False) -> list[Problem]:
    """Every problem, in the order of the manifest's fields; [] if the topology can run.

    `local`: for a run on one machine, where `file://` places need no shared volume.
    """
    return validate_analysed(spec, name, analyse(spec), local=local)


def validate_analysed(
    spec: TopologySpec, name: str, analysis: Analysis, *, local: bool
) -> list[Problem]:
    """`validate` for a caller that needs the analysis too."""
    found = [
        *check_settings(spec, name, local=local),
        *_references(spec),
        *check_unsupported(spec),
        *analysis.problems,
    ]
    return sorted(dict.fromkeys(found), key=lambda p: _order(spec, p.path))


def _order(spec: TopologySpec, path: str) -> tuple[int, int]:
    """Where a path stands: settings before sources, operators and queries, items by index."""
    for rank, field in enumerate(("sources", "operators", "queries"), start=1):
        if path.startswith(f"spec.{field}"):
            index = path.partition("[")[2].partition("]")[0]
            return rank, int(index) if index.isdigit() else -1
    return 0, 0


def _references(spec: TopologySpec) -> Iterator[Problem]:
    edges = edges_of(spec)
    unknown = list(_unknown_inputs(spec, edges))
    yield from unknown
    cycle = find_cycle(edges)
    if cycle:
        at = [o.name for o in spec.operators].index(cycle[0])
        what = f"the operators read each other in a circle: {' -> '.join([*cycle, cycle[0]])}"
        hint = "a topology has no loops; take one of these inputs out"
        yield Problem(f"spec.operators[{at}].inputs", "Cycle", what, hint)
    if not unknown:  # else what reads a misspelt name looks unused
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
    used = ancestors(edges, [q.from_ for q in spec.queries])
    for path, node in nodes_with_paths(spec):
        if node.name not in used and node.name not in cycle:
            what = f"no query needs {node.name}"
            yield Problem(path, "Unused", what, "add a query that reads it, or take it out")


def _unknown(path: str, name: str, known: list[str]) -> Problem:
    what = f"there is no source or operator {name}"
    return Problem(path, "UnknownInput", what, nearest(name, known))
