"""Derives schema, event time and partitions of every stream, and checks them.

One pass in topological order, shared by validation and compilation. It continues after a problem: a
stream whose schema is unknown is not checked further.

Design: docs/design/compilation.md#event-time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rekindle.errors import Problem
from rekindle.topology.graph import edges_of, nodes_with_paths, topological_order
from rekindle.topology.operators.kind import OperatorKind, Stream, check_key, common
from rekindle.topology.operators.registry import kind_of
from rekindle.topology.problems import InvalidSql, nearest
from rekindle.topology.schema import Field, Scalar, Schema, type_to_ddl
from rekindle.topology.spec import EventTimeSpec, OperatorSpec, SourceSpec, TopologySpec
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.event_time import parse_event_time


@dataclass(frozen=True, slots=True)
class DerivedStreams:
    streams: Mapping[str, Stream]
    problems: tuple[Problem, ...]


def derive_streams(spec: TopologySpec) -> DerivedStreams:
    """Streams of all nodes that are in no cycle, and the problems of their columns and sinks."""
    by_name: dict[str, tuple[str, SourceSpec | OperatorSpec]] = {}
    for path, node in nodes_with_paths(spec):
        by_name.setdefault(node.name, (path, node))
    streams: dict[str, Stream] = {}
    problems: list[Problem] = []
    for name in topological_order(edges_of(spec)):
        path, node = by_name[name]
        if isinstance(node, SourceSpec):
            streams[name] = _source(node, path, problems)
        else:
            inputs = {i: streams[i] for i in node.inputs if i in streams}
            streams[name] = _operator(node, inputs, path, problems)
    for at, query in enumerate(spec.queries):
        schema = streams[query.from_].schema if query.from_ in streams else None
        for kind, sink in query.sink.kinds.items():
            if schema is not None and sink is not None:
                problems += sink.check_columns(schema, f"spec.queries[{at}].sink.{kind}")
    return DerivedStreams(streams, tuple(problems))


def _source(node: SourceSpec, path: str, problems: list[Problem]) -> Stream:
    try:
        schema = ddl_to_schema(node.schema_)
    except InvalidSql as error:
        problems += [p.at(f"{path}.schema") for p in error.problems]
        return Stream(None, node.event_time.column if node.event_time else None, node.partitions)
    for field in schema:
        problems += _reserved(field.name, f"{path}.schema")
    for kind, options in node.kinds.items():
        problems += options.check_declared(schema, f"{path}.{kind}") if options is not None else ()
    declared = schema
    schema = _with_added_columns(node, schema, path, problems)
    event_time = node.event_time.column if node.event_time else None
    if node.event_time is not None and node.event_time.expression is not None:
        is_live = any(options is not None and options.is_live for options in node.kinds.values())
        raw = declared if is_live else schema  # a live source computes it from the values alone
        problems += _check_expression(node, node.event_time, schema, raw, f"{path}.eventTime")
        if event_time not in schema.names:
            schema = schema.append(Field(node.event_time.column, Scalar.TIMESTAMP))
    elif event_time is not None:
        problems += check_timestamp(schema, event_time, f"{path}.eventTime.column")
    for kind, options in node.kinds.items():
        if options is not None:
            problems += options.check_columns(schema, event_time, f"{path}.{kind}")
    no_event_time = "" if event_time else f"source {node.name} has no eventTime"
    return Stream(schema, event_time, node.partitions, no_event_time)


def _with_added_columns(
    node: SourceSpec, schema: Schema, path: str, problems: list[Problem]
) -> Schema:
    """The declared columns and those that the connector adds."""
    for kind, options in node.kinds.items():
        for option, field in (options.added_columns if options else {}).items():
            where = f"{path}.{kind}.{option}"
            problems += _reserved(field.name, where)
            if (taken := _taken(field.name, schema)) is not None:
                what = f"column {taken} is already in the schema, and {option} adds {field.name}"
                problems.append(Problem(where, "DuplicateColumn", what, "use another name"))
            else:
                schema = schema.append(field)
    return schema


def _reserved(name: str, path: str) -> Iterator[Problem]:
    if name.startswith("__"):
        what = f"column {name} begins with __"
        yield Problem(path, "ReservedColumn", what, "rename it: names with __ are reserved")


def _taken(name: str, schema: Schema) -> str | None:
    """The column that Spark would find by this name: it ignores case."""
    return next((column for column in schema.names if column.lower() == name.lower()), None)


def _check_expression(
    node: SourceSpec, event_time: EventTimeSpec, schema: Schema, raw: Schema, path: str
) -> Iterator[Problem]:
    """Problems of an event time that is computed from the columns of `raw`, and added to those of
    `schema`."""
    if any(options is not None and not options.has_raw_columns for options in node.kinds.values()):
        what = "only a source of files or kafka can compute event time from columns"
        yield Problem(f"{path}.expression", "InvalidValue", what, "leave it out")
        return
    yield from _reserved(event_time.column, f"{path}.column")
    if (taken := _taken(event_time.column, schema)) is not None:
        what = (
            f"column {taken} is already in the schema, and expression computes {event_time.column}"
        )
        hint = "rename the computed column, or leave expression out"
        yield Problem(f"{path}.column", "DuplicateColumn", what, hint)
    try:
        parse_event_time(event_time.expression or "", raw)
    except InvalidSql as error:
        yield from (p.at(f"{path}.expression") for p in error.problems)


def check_timestamp(schema: Schema, column: str, path: str) -> list[Problem]:
    """Check that a column exists and is a TIMESTAMP."""
    if column not in schema.names:
        what = f"unknown column {column}"
        return [Problem(path, "UnknownColumn", what, nearest(column, schema.names))]
    data_type = schema.field(column).type
    if data_type not in (None, Scalar.TIMESTAMP):
        what = f"column {column} is {type_to_ddl(data_type)}, not a TIMESTAMP"
        hint = "declare it TIMESTAMP, or compute a TIMESTAMP from it with eventTime.expression"
        return [Problem(path, "NotATimestamp", what, hint)]
    return []


def _operator(
    node: OperatorSpec, inputs: Mapping[str, Stream], path: str, problems: list[Problem]
) -> Stream:
    _check_keys(node, inputs, path, problems)
    kind = kind_of(node)
    partitions = _partitions(node, kind, inputs, path, problems)
    if kind is None:
        event_time = common([stream.event_time for stream in inputs.values()])
        return Stream(None, event_time, partitions)
    return replace(kind.derive(inputs, path, problems), partitions=partitions)


def _check_keys(
    node: OperatorSpec, inputs: Mapping[str, Stream], path: str, problems: list[Problem]
) -> None:
    for at, key in enumerate(node.key_by):
        for name, stream in inputs.items():
            if stream.schema is not None and key not in stream.schema.names:
                what = f"unknown column {key} in input {name}"
                hint = nearest(key, stream.schema.names)
                problems.append(Problem(f"{path}.keyBy[{at}]", "UnknownColumn", what, hint))
            elif stream.schema is not None:
                problems += check_key(stream.schema.field(key), f"{path}.keyBy[{at}]")


def _partitions(
    node: OperatorSpec,
    kind: OperatorKind | None,
    inputs: Mapping[str, Stream],
    path: str,
    problems: list[Problem],
) -> int:
    if node.key_by or (kind is not None and kind.distributes_rows):
        return node.partitions or 1
    counts = {s.partitions for s in inputs.values()}
    inherits = kind is not None and kind.inherits_partitions
    inherited = counts.pop() if len(counts) == 1 and inherits else 1
    wanted = node.partitions or inherited
    if wanted not in (1, inherited):
        what = f"{wanted} partitions without keyBy, of an input with {inherited}"
        hint = "name in keyBy the columns that rows are distributed by"
        problems.append(Problem(f"{path}.partitions", "PartitionsWithoutKeyBy", what, hint))
    return wanted
