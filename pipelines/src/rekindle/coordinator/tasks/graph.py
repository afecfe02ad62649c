"""Which partitions read which: inputs and consumers of each partition. Pure.

Built once for each generation.

Design: docs/design/replication.md#flux-as-built.
Paper: Flux (Shah et al. 2004), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.exchange.routing import partitions_read
from rekindle.topology.model import Partition, Topology
from rekindle.topology.spec import QuerySpec


@dataclass(frozen=True, slots=True)
class Graph:
    """`partitions` in topological order, sources first."""

    partitions: tuple[Partition, ...]
    consumers: Mapping[Partition, tuple[Partition, ...]]
    inputs: Mapping[Partition, tuple[Partition, ...]]
    streams: Mapping[str, str]  # segment id -> operator id of its stream
    queries: Mapping[str, tuple[QuerySpec, ...]]  # segment id -> queries of its stream
    sources: Mapping[str, tuple[Partition, ...]]  # segment id -> source partitions upstream


def build_graph(topology: Topology) -> Graph:
    partitions: list[Partition] = []
    consumers: dict[Partition, list[Partition]] = {}
    inputs: dict[Partition, tuple[Partition, ...]] = {}
    sources: dict[str, tuple[Partition, ...]] = {}
    for segment in topology.segments:
        for index in range(segment.partitions):
            mine = Partition(segment.id, index)
            partitions.append(mine)
            consumers[mine] = []
            read: list[Partition] = []
            for entry in segment.inputs:
                producer = topology.producer(entry.stream).id
                read.extend(Partition(producer, i) for i in partitions_read(entry, index))
            inputs[mine] = tuple(dict.fromkeys(read))
            for upstream in inputs[mine]:
                consumers[upstream].append(mine)
        producers = [topology.producer(entry.stream).id for entry in segment.inputs]
        if producers:
            sources[segment.id] = tuple(dict.fromkeys(p for id_ in producers for p in sources[id_]))
        else:
            sources[segment.id] = tuple(Partition(segment.id, i) for i in range(segment.partitions))
    return Graph(
        partitions=tuple(partitions),
        consumers={p: tuple(c) for p, c in consumers.items()},
        inputs=inputs,
        streams={s.id: s.stream for s in topology.segments},
        queries={
            s.id: tuple(q for q in topology.spec.queries if q.name in s.queries)
            for s in topology.segments
        },
        sources=sources,
    )


def downstream(graph: Graph, partition: Partition) -> tuple[Partition, ...]:
    """All consumers of a partition's stream, direct or indirect, in topological order."""
    reached = {partition}
    for one in graph.partitions:
        if any(upstream in reached for upstream in graph.inputs[one]):
            reached.add(one)
    return tuple(one for one in graph.partitions if one in reached and one != partition)
