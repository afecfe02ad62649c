"""Compiles a spec to segments: fusion, exchanges, operator ids. A pure function.

An operator id is a hash of what the operator computes: its name and definition, its input ids, a
source's schema, its partitions. Fields that only affect how, where or when it runs (priority,
replicas, resources, suspend, sinks, the topology's name) are not hashed, so that they can change in
place. The inferred schema of an operator is not hashed either: it follows from the rest, and a
newer sqlglot must not change ids. Fields with their default value are left out, so that new fields
change no id; a default itself must never change.

Design: docs/design/compilation.md#segments, docs/design/compilation.md#operator-ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.errors import InvalidTopology
from rekindle.topology.checks.streams import DerivedStreams, derive_streams
from rekindle.topology.graph import consumers, edges_of, nodes_with_paths, topological_order
from rekindle.topology.model import Exchange, Input, Node, Segment, Topology
from rekindle.topology.operators.kind import Stream
from rekindle.topology.operators.registry import KINDS, kind_of
from rekindle.topology.problems import MISTAKES
from rekindle.topology.resources import task_resources
from rekindle.topology.schema import Schema, type_in_operator_id
from rekindle.topology.spec import OperatorSpec, SourceSpec, TopologySpec
from rekindle.topology.validate import validate_derived

_ID_LENGTH = 16
_NOT_IN_ID = {"replicas", "resources", "partitions", "checkpoint", "inputs", "schema"}


def compile_topology(
    spec: TopologySpec, name: str, *, skip_cluster_checks: bool = False, accepted: bool = False
) -> Topology:
    """Validate and compile; raises InvalidTopology with all problems.

    `accepted`: of a generation that runs, so that a newer release refuses it only if it cannot be
    computed.

    `skip_cluster_checks`: for a run on one machine, where `file://` URLs need no shared volume,
    and for a spec that the operator has checked.
    """
    derived = derive_streams(spec)
    problems = validate_derived(spec, name, derived, skip_cluster_checks=skip_cluster_checks)
    if accepted:
        problems = [problem for problem in problems if problem.reason not in MISTAKES]
    if problems:
        raise InvalidTopology(problems)
    nodes = _nodes(spec, derived)
    chains = _chains(spec, nodes)
    segments = [_segment(spec, nodes, chain) for chain in chains]
    segments.sort(key=lambda s: not s.is_source)  # stable: the rest stays in topological order
    return Topology(name, spec, nodes, tuple(segments))


def _nodes(spec: TopologySpec, derived: DerivedStreams) -> dict[str, Node]:
    by_name = {node.name: node for _, node in nodes_with_paths(spec)}
    nodes: dict[str, Node] = {}
    for name in topological_order(edges_of(spec)):
        node, stream = by_name[name], derived.streams[name]
        inputs = node.inputs if isinstance(node, OperatorSpec) else ()
        own_id = _node_id(node, stream, [nodes[i].id for i in inputs])
        schema = stream.schema if stream.schema is not None else Schema()
        nodes[name] = Node(
            name,
            own_id,
            node,
            inputs,
            schema,
            stream.event_time,
            stream.partitions,
            at_window_end=bool(stream.at_window_end),
        )
    return nodes


def _node_id(node: SourceSpec | OperatorSpec, stream: Stream, inputs: Sequence[str]) -> str:
    definition = node.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(node, SourceSpec):
        kind, options = node.kind
        options.remove_fields_of_new_pods(definition[kind])
    else:
        for field, of_kind in KINDS.items():
            for name in of_kind.not_in_id:
                definition.get(field, {}).pop(name, None)
    schema = stream.schema if isinstance(node, SourceSpec) else None
    return _digest(
        {
            "definition": {k: v for k, v in definition.items() if k not in _NOT_IN_ID},
            "inputs": list(inputs),
            "schema": [[f.name, type_in_operator_id(f.type)] for f in schema or ()],
            "partitions": stream.partitions,
        }
    )


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]


def _chains(spec: TopologySpec, nodes: Mapping[str, Node]) -> list[list[str]]:
    """Node names by segment, in topological order of their first nodes."""
    readers = consumers({name: node.inputs for name, node in nodes.items()})
    queried = {q.from_ for q in spec.queries}
    chains: dict[str, list[str]] = {}  # by last node
    for name, node in nodes.items():
        before = node.inputs[0] if len(node.inputs) == 1 else ""
        if (
            before in chains
            and before not in queried
            and readers[before] == (name,)
            and _fuses_with_input(node)
            and node.partitions == nodes[before].partitions
            and _replicas(spec, node) == _replicas(spec, nodes[before])
        ):
            chains[name] = [*chains.pop(before), name]
        else:
            chains[name] = [name]
    position = {name: at for at, name in enumerate(nodes)}
    return sorted(chains.values(), key=lambda chain: position[chain[0]])


def _fuses_with_input(node: Node) -> bool:
    kind = kind_of(node.spec)
    return kind is not None and kind.fuses_with_input()


def _replicas(spec: TopologySpec, node: Node) -> int:
    return node.spec.replicas or spec.replicas


def _segment(spec: TopologySpec, nodes: Mapping[str, Node], chain: Sequence[str]) -> Segment:
    first, last = nodes[chain[0]], nodes[chain[-1]]
    kind = kind_of(first.spec)
    return Segment(
        id=_digest([nodes[name].id for name in chain]),
        name=last.name,
        nodes=tuple(chain),
        stream=last.id,
        inputs=tuple(_input(nodes[i], first, at) for at, i in enumerate(first.inputs)),
        partitions=last.partitions,
        replicas=_replicas(spec, last),
        queries=tuple(q.name for q in spec.queries if q.from_ == last.name),
        resources=task_resources((nodes[n].spec.resources for n in chain), spec.resources),
        blocks=kind is not None and kind.blocks,
    )


def _input(producer: Node, consumer: Node, at: int) -> Input:
    kind = kind_of(consumer.spec)
    key_by = kind.keys(at) if kind is not None else ()
    if key_by:
        exchange = Exchange.HASH
    elif producer.partitions == consumer.partitions:
        exchange = Exchange.FORWARD
    else:
        exchange = Exchange.GATHER
    return Input(producer.id, producer.name, producer.schema, producer.partitions, exchange, key_by)
