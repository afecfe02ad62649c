"""A compiled topology as text for a terminal: segments, exchanges, tasks, resources."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.topology.model import Input, Node, Segment, Topology
from rekindle.topology.operators.registry import kind_of
from rekindle.topology.spec import SourceSpec

_MIB = 1024**2


def describe(topology: Topology) -> str:
    """A paragraph for each segment, then the totals."""
    lines = [f"topology {topology.name}"]
    for segment in topology.segments:
        lines += ["", *_segment(topology, segment)]
    lines += ["", *_totals(topology)]
    return "\n".join(lines)


def _segment(topology: Topology, segment: Segment) -> Iterator[str]:
    tasks = segment.partitions * segment.replicas
    yield f"segment {segment.name}  {segment.id}"
    yield f"  nodes      {' -> '.join(segment.nodes)}"
    for name in segment.nodes:
        yield f"             {name}: {describe_node(topology.nodes[name])}"
    for stream in segment.inputs:
        yield f"  reads      {describe_input(stream)}"
    if segment.queries:
        by_name = {q.name: q.priority for q in topology.spec.queries}
        queries = ", ".join(f"{q} (priority {by_name[q]})" for q in segment.queries)
        yield f"  queries    {queries}"
    yield f"  tasks      {tasks} = {segment.partitions} partitions x {segment.replicas} replicas"
    resources = segment.resources
    yield f"  requests   {describe_resources(resources.cpu_m, resources.memory_bytes)}"
    yield f"  columns    {', '.join(topology.nodes[segment.nodes[-1]].schema.names)}"


def describe_input(stream: Input) -> str:
    """`flown by hash of origin`."""
    return f"{stream.name} by {describe_exchange(stream)}"


def describe_exchange(stream: Input) -> str:
    """`hash of origin`."""
    keys = f" of {', '.join(stream.key_by)}" if stream.key_by else ""
    return f"{stream.exchange.value}{keys}"


def describe_node(node: Node) -> str:
    """What a source reads or an operator does, as in
    `window 24h every 6h by origin: count(*) AS flights`."""
    spec = node.spec
    if isinstance(spec, SourceSpec):
        _, options = spec.kind
        description = options.describe()
        return f"{description}, event time {node.event_time}" if node.event_time else description
    kind = kind_of(spec)
    return kind.describe() if kind is not None else ""


def box_lines(topology: Topology, segment: Segment) -> tuple[str, ...]:
    """Lines of a segment's box in a drawing, the title first."""
    tasks = segment.partitions * segment.replicas
    partitions = _counted(segment.partitions, "partition")
    resources = describe_resources(segment.resources.cpu_m, segment.resources.memory_bytes)
    return (
        segment.name,
        *(f"{name}: {describe_node(topology.nodes[name])}" for name in segment.nodes),
        f"{_counted(tasks, 'task')}: {partitions} × {_counted(segment.replicas, 'replica')}",
        f"{resources} each",
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_resources(cpu_m: int, memory: int) -> str:
    """`500m CPU, 1024 MiB`."""
    return f"{cpu_m}m CPU, {memory // _MIB} MiB"


def _totals(topology: Topology) -> Iterator[str]:
    counts = [(s, s.partitions * s.replicas) for s in topology.segments]
    tasks = sum(n for _, n in counts)
    cpu = sum(s.resources.cpu_m * n for s, n in counts)
    memory = sum(s.resources.memory_bytes * n for s, n in counts)
    yield f"{tasks} tasks in {len(counts)} segments request {describe_resources(cpu, memory)}"
    for query in sorted(topology.spec.queries, key=lambda q: -q.priority):
        needs = [s.name for s in topology.needed_segments(query)]
        yield f"query {query.name} (priority {query.priority}) needs {', '.join(needs)}"
