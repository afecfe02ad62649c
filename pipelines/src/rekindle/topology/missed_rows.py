"""Which rows an operator has missed because its definition, or one above it, began later than the
topology. A pure function of the compiled topology and the epochs after which operators began.

An operator that begins after epoch b reads no row of the epochs through b. Up to which event time
rows may be missing follows from its sources: a source has released no row newer than its newest
event time through b. A window that begins later than that has all its rows; one that begins at or
before it may lack some, and so may a later window that would have read that one. Of an
operator that begins after one above it, its own b counts for both: the newest event time only
grows, and a live source knows that of an old epoch only until its record is deleted.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from rekindle.topology.model import Topology
from rekindle.topology.operators.registry import kind_of
from rekindle.topology.spec import SourceSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class MissedRows:
    """Rows that `source` released through `epoch`. They may be missing up to `added_us` after the
    newest event time that it had released then."""

    source: str  # name
    epoch: int
    added_us: int = 0


def missed_rows(topology: Topology, begun: Mapping[str, int]) -> dict[str, frozenset[MissedRows]]:
    """For each operator, by name, the rows that its input has lacked since it began; windows that
    begin later have all of theirs. `begun`: by operator id, the epoch after which it began; of
    those that began with the topology there is none."""
    sources: dict[str, frozenset[str]] = {}
    found: dict[str, frozenset[MissedRows]] = {}
    passed_on: dict[str, frozenset[MissedRows]] = {}  # what its output lacks
    for name, node in topology.nodes.items():  # in topological order
        is_source = isinstance(node.spec, SourceSpec)
        sources[name] = frozenset({name}) if is_source else _union(sources, node.inputs)
        missed = _union(passed_on, node.inputs)
        if node.id in begun:
            own = begun[node.id]
            missed = frozenset(replace(m, epoch=max(m.epoch, own)) for m in missed)
            missed |= {MissedRows(source, own) for source in sources[name]}
        found[name] = passed_on[name] = _reduced(missed)
        kind = kind_of(node.spec)
        if kind is not None and (reach_us := kind.reach_us()):
            passed_on[name] = frozenset(
                replace(m, added_us=m.added_us + reach_us) for m in found[name]
            )
    return found


def _union(sets: Mapping[str, frozenset[_T]], names: Iterable[str]) -> frozenset[_T]:
    return frozenset[_T]().union(*(sets[name] for name in names))


def _reduced(missed: frozenset[MissedRows]) -> frozenset[MissedRows]:
    """Without those that another one contains."""
    return frozenset(
        m
        for m in missed
        if not any(
            o != m and o.source == m.source and o.epoch >= m.epoch and o.added_us >= m.added_us
            for o in missed
        )
    )
