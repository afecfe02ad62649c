"""A compiled topology as text for a terminal: segments, exchanges, tasks, resources."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.topology.model import Input, Segment, Topology

_MIB = 1024**2


def describe(topology: Topology) -> str:
    """What runs where rows go: a paragraph for each segment, then the sums."""
    lines = [f"topology {topology.name}"]
    for segment in topology.segments:
        lines += ["", *_segment(topology, segment)]
    lines += ["", *_sums(topology)]
    return "\n".join(lines)


def _segment(topology: Topology, segment: Segment) -> Iterator[str]:
    tasks = segment.partitions * segment.replicas
    yield f"segment {segment.name}  {segment.id}"
    yield f"  nodes      {' -> '.join(segment.nodes)}"
    for stream in segment.inputs:
        yield f"  reads      {describe_input(stream)}"
    if segment.queries:
        by_name = {q.name: q.priority for q in topology.spec.queries}
        queries = ", ".join(f"{q} (priority {by_name[q]})" for q in segment.queries)
        yield f"  queries    {queries}"
    yield f"  tasks      {tasks} = {segment.partitions} partitions x {segment.replicas} replicas"
    yield f"  each asks  {describe_resources(segment.resources.cpu_m, segment.resources.memory)}"
    yield f"  columns    {', '.join(topology.nodes[segment.nodes[-1]].schema.names)}"


def describe_input(stream: Input) -> str:
    """`flown by hash of origin`."""
    keys = f" of {', '.join(stream.key_by)}" if stream.key_by else ""
    return f"{stream.name} by {stream.exchange.value}{keys}"


def describe_resources(cpu_m: int, memory: int) -> str:
    """`500m CPU, 1024 MiB`."""
    return f"{cpu_m}m CPU, {memory // _MIB} MiB"


def _sums(topology: Topology) -> Iterator[str]:
    counts = [(s, s.partitions * s.replicas) for s in topology.segments]
    tasks = sum(n for _, n in counts)
    cpu = sum(s.resources.cpu_m * n for s, n in counts)
    memory = sum(s.resources.memory * n for s, n in counts)
    yield f"{tasks} tasks in {len(counts)} segments ask {describe_resources(cpu, memory)}"
    for query in sorted(topology.spec.queries, key=lambda q: -q.priority):
        needs = [s.name for s in topology.ancestry(query)]
        yield f"query {query.name} (priority {query.priority}) needs {', '.join(needs)}"
