"""The compiled topology: streams, segments and tasks. Pure data.

Made from a validated spec by `rekindle.topology.compile.compile_topology`; read by the engine, the
coordinator, the operator, the reference execution and the command line.

Design: docs/design/compilation.md#segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rekindle.topology.schema import Schema
from rekindle.topology.spec import OperatorSpec, QuerySpec, SourceSpec, TopologySpec

MAX_REPLICAS = 8  # maximum of `replicas` in a spec


class Exchange(StrEnum):
    """How the partitions of a segment read the partitions of a stream."""

    FORWARD = "forward"  # partition i reads partition i
    HASH = "hash"  # every partition reads its share, by key, of every partition
    GATHER = "gather"  # the only partition reads all


@dataclass(frozen=True, slots=True)
class Node:
    """A source or an operator. `id` is the operator id: hash of definition, input ids, schema and
    partitions; it names the stream, the state and the log. `event_time` is the
    event-time column of this stream, or None."""

    name: str
    id: str
    spec: SourceSpec | OperatorSpec
    inputs: tuple[str, ...]  # names
    schema: Schema
    event_time: str | None
    partitions: int
    at_window_end: bool = False
    """Whether the event time is the end of a window, which is exclusive, in all rows."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a segment: the stream of another segment."""

    stream: str  # operator id
    name: str  # node name, the name SQL uses in FROM
    schema: Schema
    partitions: int  # of the producer
    exchange: Exchange
    key_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource requests of one task; `cpu_m`: milli-CPU."""

    cpu_m: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A chain of fused nodes; its stream is that of the last node. `id`, a hash of the operator ids
    of its nodes, identifies it in pods, checkpoint entries and polls. `inputs` is empty if, and
    only if, the first node is a source."""

    id: str
    name: str  # of the last node
    nodes: tuple[str, ...]
    stream: str  # operator id of the last node
    inputs: tuple[Input, ...]
    partitions: int
    replicas: int
    queries: tuple[str, ...]
    resources: Resources
    blocks: bool = False
    """Whether no epoch is processed without one of the inputs."""

    @property
    def is_source(self) -> bool:
        return not self.inputs


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for a task: one replica of one partition of one segment (by segment id).

    Each replica of a spec has two numbers, `replica_index` and `replica_index + MAX_REPLICAS`, of
    which it uses one at a time: a planned move starts the task under the other one
    (docs/design/planned-moves.md)."""

    segment: str
    partition: int
    replica: int

    @property
    def key(self) -> str:
        return f"{self.segment}/{self.partition}/{self.replica}"

    @property
    def replica_index(self) -> int:
        """The index of the replica in the spec, from 0."""
        return self.replica % MAX_REPLICAS

    @property
    def first(self) -> Slot:
        """The same replica under its first number, below MAX_REPLICAS."""
        return Slot(self.segment, self.partition, self.replica_index)

    @property
    def alternate(self) -> Slot:
        """The same replica under its other number: in a planned move the pod that is replaced and
        its successor have one each."""
        if self != self.first:
            return self.first
        return Slot(self.segment, self.partition, self.replica_index + MAX_REPLICAS)


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One partition of a segment (by segment id), any replica."""

    segment: str
    index: int

    @property
    def key(self) -> str:
        """Its key in a manifest."""
        return f"{self.segment}/{self.index}"


def partition_of(slot: Slot) -> Partition:
    return Partition(slot.segment, slot.partition)


@dataclass(frozen=True, slots=True)
class Topology:
    """A compiled topology. `segments` are in topological order, sources first."""

    name: str
    spec: TopologySpec
    nodes: Mapping[str, Node]
    segments: tuple[Segment, ...]

    def segment(self, segment_id: str) -> Segment:
        return next(s for s in self.segments if s.id == segment_id)

    def producer(self, stream: str) -> Segment:
        """The segment that produces a stream (by operator id)."""
        return next(s for s in self.segments if s.stream == stream)

    def consumers(self, segment: Segment) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if any(i.stream == segment.stream for i in s.inputs))

    def queried_segment(self, query: QuerySpec) -> Segment:
        """The segment whose stream a query writes."""
        return next(s for s in self.segments if query.name in s.queries)

    def needed_segments(self, query: QuerySpec) -> tuple[Segment, ...]:
        """The segments that a query needs, itself included, in topological order."""
        needed = {self.queried_segment(query).id}
        for segment in reversed(self.segments):
            if segment.id in needed:
                needed |= {self.producer(i.stream).id for i in segment.inputs}
        return tuple(s for s in self.segments if s.id in needed)

    def paths(self, query: QuerySpec) -> tuple[frozenset[str], ...]:
        """For each source of a query, the ids of the segments from the source to the query, both
        included, and of all that is above one of them that blocks: without it there are no
        results."""
        needed, found = self.needed_segments(query), list[frozenset[str]]()
        for source in (s for s in needed if not s.inputs):
            path = {source.id}
            for segment in needed:
                if any(self.producer(i.stream).id in path for i in segment.inputs):
                    path.add(segment.id)
            whole = {s.id for s in needed if s.blocks} & path
            for segment in reversed(needed):
                if segment.id in whole:
                    whole |= {self.producer(i.stream).id for i in segment.inputs}
            path |= whole
            found.append(frozenset(path))
        return tuple(found)

    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(s.id, p, r)
            for s in self.segments
            for p in range(s.partitions)
            for r in range(s.replicas)
        )
