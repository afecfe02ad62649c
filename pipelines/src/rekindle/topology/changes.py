"""What an edit of a topology does: which operators keep their state, which begin anew, and why.

A pure function of two compiled topologies: `rekindle validate --against` prints it before an edit,
the operator reports it in the Event of the acceptance.

Design: docs/topology.md#changing-a-topology.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.topology.model import Node, Topology
from rekindle.topology.spec import OperatorSpec, QuerySpec, SourceSpec

_MAX_NAMED = 5  # in one line


@dataclass(frozen=True, slots=True)
class Change:
    """A source, operator or query that begins anew, and the cause."""

    name: str
    cause: str

    def __str__(self) -> str:
        return f"{self.name} ({self.cause})"


@dataclass(frozen=True, slots=True)
class Changes:
    """`kept`, `begun`, `added`, `removed`: sources and operators, in the order of the topology.
    `incomplete`: queries that go on under their name, and whose results of some time are missing.
    `added_queries`, `removed_queries`: by name."""

    kept: tuple[str, ...]
    begun: tuple[Change, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    incomplete: tuple[Change, ...]
    added_queries: tuple[str, ...]
    removed_queries: tuple[str, ...]

    @property
    def loses_results(self) -> bool:
        return bool(self.begun or self.incomplete)

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        for name in self.kept:
            yield f"  {name} keeps its state"
        for change in self.begun:
            yield f"  {change.name} begins anew: {change.cause}"
        for name in self.added:
            yield f"  {name} is new"
        for name in self.removed:
            yield f"  {name} ends: it is removed"
        for change in self.incomplete:
            yield f"  query {change.name} will lack results: {change.cause}"
        for name in self.added_queries:
            yield f"  query {name} is added, and begins with an epoch after the edit"
        for name in self.removed_queries:
            yield f"  query {name} ends: it is removed; what it has written stays"

    def summary(self) -> str:
        """In one line, for an Event."""
        parts = []
        if self.begun:
            parts.append(f"begin anew: {_listed(map(str, self.begun))}")
        if self.kept and self.begun:
            parts.append(f"keep their state: {_listed(self.kept)}")
        if self.incomplete:
            parts.append(f"will lack results: {_listed(map(str, self.incomplete))}")
        return "; ".join(parts) or "all operators keep their state"


def compare(old: Topology, new: Topology) -> Changes:
    """What begins anew if `new` takes the place of `old`. An operator keeps its state if, and only
    if, its operator id stays."""
    kept, begun = list[str](), list[Change]()
    for name, node in new.nodes.items():
        before = old.nodes.get(name)
        if before is not None and before.id == node.id:
            kept.append(name)
        elif before is not None:
            begun.append(Change(name, _cause(before, node, {c.name for c in begun})))
    known = {query.name: query for query in old.spec.queries}
    incomplete = [
        Change(query.name, cause)
        for query in new.spec.queries
        if query.name in known
        and (cause := _query_cause(known[query.name], query, {c.name for c in begun}))
    ]
    return Changes(
        tuple(kept),
        tuple(begun),
        tuple(name for name in new.nodes if name not in old.nodes),
        tuple(name for name in old.nodes if name not in new.nodes),
        tuple(incomplete),
        tuple(q.name for q in new.spec.queries if q.name not in known),
        tuple(n for n in known if n not in {q.name for q in new.spec.queries}),
    )


def _cause(old: Node, new: Node, begun: set[str]) -> str:
    upstream = [name for name in new.inputs if name in begun]
    causes = list(_own_causes(old, new, reads_begun=bool(upstream)))
    if upstream:
        what = "which begins anew" if len(upstream) == 1 else "which begin anew"
        causes.append(f"reads {' and '.join(upstream)}, {what}")
    return "; ".join(causes) or "its definition changed"


def _own_causes(old: Node, new: Node, reads_begun: bool) -> Iterator[str]:
    is_inherited = reads_begun and old.spec.partitions == new.spec.partitions  # of its input
    if old.partitions != new.partitions and not is_inherited:
        yield f"partitions {old.partitions} -> {new.partitions}"
    if old.inputs != new.inputs:
        yield f"inputs {', '.join(old.inputs)} -> {', '.join(new.inputs)}"
    before, after = _definition(old.spec), _definition(new.spec)
    changed = [f for f in dict.fromkeys((*after, *before)) if before.get(f) != after.get(f)]
    if changed:
        yield f"its {' and '.join(changed)} changed"


def _definition(spec: SourceSpec | OperatorSpec) -> Mapping[str, Any]:
    """The fields that say what is computed, but for those that `_own_causes` names apart."""
    left_out = {"name", "inputs", "partitions", "replicas", "resources", "checkpoint"}
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {name: value for name, value in fields.items() if name not in left_out}


def _query_cause(old: QuerySpec, new: QuerySpec, begun: set[str]) -> str:
    if old.from_ != new.from_:
        return f"from {old.from_} -> {new.from_}"
    if new.from_ in begun:
        return f"reads {new.from_}, which begins anew"
    return "its sink changed" if old.input_and_sink != new.input_and_sink else ""


def _listed(names: Any) -> str:
    found = list(names)
    more = len(found) - _MAX_NAMED
    return ", ".join(found[:_MAX_NAMED]) + (f", and {more} more" if more > 0 else "")
