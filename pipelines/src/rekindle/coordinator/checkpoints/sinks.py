"""Which sinks a partition has to write, and which entries may be committed. Pure.

An entry may only be committed if all sinks of its partition have all epochs up to it: a task that
is restored from it does not write them again. The manifest names the sinks; a task may not know a
new one yet.

Design: docs/design/coordinator.md#checkpoints, docs/design/exactly-once.md#sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rekindle.checkpoints.manifest import Manifest, QueryStart
from rekindle.coordinator.tasks.graph import Graph
from rekindle.protocol import EntryRef, PollResponse, SinkAssignment
from rekindle.topology.spec import QuerySpec


def assigned_sinks(graph: Graph, manifest: Manifest, segment: str) -> tuple[SinkAssignment, ...]:
    """Equal for all partitions of a segment. `manifest` is of the graph's generation."""
    return tuple(
        _assignment(query, manifest.queries[query.name]) for query in graph.queries.get(segment, ())
    )


def _assignment(query: QuerySpec, start: QueryStart) -> SinkAssignment:
    return SinkAssignment(
        query=query.name,
        from_epoch=start.epoch,
        sink=query.sink,
        definition=start.definition,
        generation=start.generation,
    )


def durable_epoch(response: PollResponse, assigned: SinkAssignment) -> int:
    """The newest durable epoch of an assignment. If the task does not have this assignment yet,
    nothing was written for it, even if it has another one of the same query."""
    found = (s.durable for s in response.sinks if s.assigned.writes_same_output_as(assigned))
    return next(found, assigned.from_epoch - 1)


def written_entries(
    entries: Iterable[EntryRef], response: PollResponse, sinks: Sequence[SinkAssignment]
) -> list[EntryRef]:
    """Those of a task's entries up to the epoch that all its sinks have."""
    through = [durable_epoch(response, assigned) for assigned in sinks]
    return [saved for saved in entries if all(saved.epoch <= e for e in through)]
