"""Derives schema, event time and partitions of every stream, and checks them.

One pass in topological order, shared by validation and compilation. It continues after a problem: a
stream whose schema is unknown is not checked further.

Design: docs/design/compilation.md#event-time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rekindle.errors import Problem
from rekindle.topology.graph import edges_of, nodes_with_paths, topological_order
from rekindle.topology.problems import InvalidSql, nearest
from rekindle.topology.schema import Field, Scalar, Schema, is_nested, type_to_ddl
from rekindle.topology.spec import EventTimeSpec, OperatorSpec, SourceSpec, TopologySpec, WindowSpec
from rekindle.topology.sql.aggregates import parse_aggregates, type_problems
from rekindle.topology.sql.columns import unknown_columns
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.event_time import parse_event_time
from rekindle.topology.sql.inference import infer_types
from rekindle.topology.sql.row_wise import SelectAnalysis, SqlAnalysis, check_sql
from rekindle.topology.windows.kind import END, START


@dataclass(frozen=True, slots=True)
class Stream:
    """A node's output. `schema` is None if it is unknown, for which a problem is reported."""

    schema: Schema | None
    event_time: str | None
    partitions: int
    no_event_time: str = ""
    """Why there is no event time, if there is none."""
    at_window_end: bool | None = False
    """Whether event time is the end of a window, which is exclusive; None: for some rows only."""


@dataclass(frozen=True, slots=True)
class DerivedStreams:
    streams: Mapping[str, Stream]
    problems: tuple[Problem, ...]


def derive_streams(spec: TopologySpec) -> DerivedStreams:
    """Streams of all nodes that are in no cycle, and the problems of their columns."""
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
    return DerivedStreams(streams, tuple(problems))


def _source(node: SourceSpec, path: str, problems: list[Problem]) -> Stream:
    try:
        schema = ddl_to_schema(node.schema_)
    except InvalidSql as error:
        problems += [p.at(f"{path}.schema") for p in error.problems]
        return Stream(None, node.event_time.column if node.event_time else None, node.partitions)
    for field in schema:
        problems += _reserved(field.name, f"{path}.schema")
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
    partitions = _partitions(node, inputs, path, problems)
    if node.sql is not None:
        analysis = check_sql(node.sql, {name: s.schema for name, s in inputs.items()})
        if len(inputs) == len(node.inputs):  # else an unknown input has been reported
            problems += [p.at(f"{path}.sql") for p in analysis.problems]
        event_time = _kept_event_time(analysis, inputs)
        no_event_time = "" if event_time else _why_no_event_time(node.name, analysis, inputs)
        ends = {s.at_window_end for s in inputs.values()} or {False}
        at_end = ends.pop() if len(ends) == 1 else None
        return Stream(analysis.schema, event_time, partitions, no_event_time, at_end)
    if node.window is not None:
        schema = _window(node, node.window, inputs, path, problems)
        return Stream(schema, END, partitions, at_window_end=True)
    return Stream(None, _common([s.event_time for s in inputs.values()]), partitions)


def _common(values: list[str | None]) -> str | None:
    return values[0] if values and all(v == values[0] for v in values) else None


def _kept_event_time(analysis: SqlAnalysis, inputs: Mapping[str, Stream]) -> str | None:
    """The event time of the output: a column whose position has event time in every SELECT, since
    UNION ALL goes by position. If there are several, the one that is named like the event time of
    the first SELECT's input, else the first."""
    if analysis.schema is None:
        return _common([s.event_time for s in inputs.values()])
    positions = [_event_time_positions(select, inputs[select.input]) for select in analysis.selects]
    everywhere = set.intersection(*positions) if positions else set()
    if not everywhere:
        return None
    names, first = analysis.schema.names, inputs[analysis.selects[0].input].event_time
    return names[min(everywhere, key=lambda at: (names[at] != first, at))]


def _event_time_positions(select: SelectAnalysis, stream: Stream) -> set[int]:
    """The positions of a SELECT's output columns that are event time. If the SELECT computes a
    TIMESTAMP with the name of the input's event time, only that one; else all copies of the input's
    event time. `select.copies`: for each output column the input column that it copies, if any."""
    if stream.event_time is None:
        return set()
    copies = {at for at, column in enumerate(select.copies) if column == stream.event_time}
    for at, column in enumerate(select.columns):
        if column.name == stream.event_time and column.type in (None, Scalar.TIMESTAMP):
            return copies if at in copies else {at}
    return copies


def _why_no_event_time(operator: str, analysis: SqlAnalysis, inputs: Mapping[str, Stream]) -> str:
    """A message about the SELECTs that do not output event time, or not at the same position."""
    for name, stream in inputs.items():
        if stream.event_time is None:
            return stream.no_event_time or f"{name} has none"
    positions: dict[str, None] = {}
    for select in analysis.selects:
        found = _event_time_positions(select, inputs[select.input])
        if not found:
            column = inputs[select.input].event_time
            what = f"does not output {column}, its event time"
            return f"in {operator}, SELECT FROM {select.input} {what}"
        numbers = " and ".join(str(at + 1) for at in sorted(found))
        positions[f"column {numbers} of SELECT FROM {select.input}"] = None
    what = "UNION ALL matches columns by position, and event time is"
    return f"in {operator}, {what} {', but '.join(positions)}"


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
                problems += _check_key(stream.schema.field(key), f"{path}.keyBy[{at}]")
        if node.window is not None and key not in node.window.group_by:
            what = f"keyBy column {key} is not in the window's groupBy"
            hint = "a group must be in one partition: add it to groupBy, or drop it from keyBy"
            problems.append(Problem(f"{path}.keyBy[{at}]", "KeyNotGrouped", what, hint))


def _check_key(field: Field, path: str) -> list[Problem]:
    """Arrays and structs have no canonical form for hashing or grouping."""
    if not is_nested(field.type):
        return []
    what = f"column {field.name} is {type_to_ddl(field.type)}, which cannot be a key"
    return [Problem(path, "NotAKey", what, "use a field or an element of it, with sql")]


def _partitions(
    node: OperatorSpec, inputs: Mapping[str, Stream], path: str, problems: list[Problem]
) -> int:
    if node.key_by:
        return node.partitions or 1
    counts = {s.partitions for s in inputs.values()}
    inherited = counts.pop() if len(counts) == 1 and node.sql is not None else 1
    wanted = node.partitions or inherited
    if wanted not in (1, inherited):
        what = f"{wanted} partitions without keyBy, of an input with {inherited}"
        hint = "name in keyBy the columns that rows are distributed by"
        problems.append(Problem(f"{path}.partitions", "PartitionsWithoutKeyBy", what, hint))
    return wanted


def _window(
    node: OperatorSpec,
    window: WindowSpec,
    inputs: Mapping[str, Stream],
    path: str,
    problems: list[Problem],
) -> Schema | None:
    for at, name in enumerate(node.inputs):
        stream = inputs.get(name)
        if stream is None or stream.schema is None:
            continue
        if stream.event_time is None:
            problems.append(_no_event_time(name, stream, f"{path}.inputs[{at}]"))
        elif stream.at_window_end is None:
            problems.append(_two_event_times(name, f"{path}.inputs[{at}]"))
    schema = _same_schema(inputs, f"{path}.inputs", problems)
    groups = _groups(window, schema, path, problems)
    aggregates = _aggregates(window, schema, path, problems)
    if groups is None or aggregates is None:
        return None
    fields = [Field(c, Scalar.TIMESTAMP) for c in (START, END)] + groups + aggregates
    lower = [f.name.lower() for f in fields]
    twice = dict.fromkeys(n for n in lower if lower.count(n) > 1)
    for column in twice:
        what = f"column {column} occurs twice in the window's output"
        hint = "its columns are window_start, window_end, groupBy and the aggregates"
        problems.append(Problem(f"{path}.window", "DuplicateColumn", what, hint))
    return None if twice else Schema(tuple(fields))


def _no_event_time(name: str, stream: Stream, path: str) -> Problem:
    why = f": {stream.no_event_time}" if stream.no_event_time else ""
    what = f"a window needs event time, and input {name} has none{why}"
    hint = (
        "set eventTime of the source, and output its column in every SELECT, under any name and "
        "at the same position"
    )
    return Problem(path, "NoEventTime", what, hint)


def _two_event_times(name: str, path: str) -> Problem:
    what = (
        f"input {name} mixes results of windows, whose event time is the end of the window, with "
        "other rows"
    )
    hint = "write an sql operator for each of the two, and name both in the inputs of this window"
    return Problem(path, "InputsDiffer", what, hint)


def _same_schema(inputs: Mapping[str, Stream], path: str, problems: list[Problem]) -> Schema | None:
    """The common schema of a window's inputs."""
    if not inputs or any(s.schema is None for s in inputs.values()):
        return None
    (first, stream), *others = inputs.items()
    for name, other in others:
        if not _alike(stream, other):
            what = f"inputs {first} and {name} differ in {_difference(stream, other)}"
            hint = "give them the same columns, with a sql operator for each"
            problems.append(Problem(path, "InputsDiffer", what, hint))
            return None
    return stream.schema


def _difference(a: Stream, b: Stream) -> str:
    if a.schema is not None and b.schema is not None and a.schema.names != b.schema.names:
        return f"columns: {', '.join(a.schema.names)} and {', '.join(b.schema.names)}"
    if a.event_time != b.event_time:
        return f"event time: {a.event_time or 'none'} and {b.event_time or 'none'}"
    return "types of columns"


def _alike(a: Stream, b: Stream) -> bool:
    if a.schema is None or b.schema is None or a.event_time != b.event_time:
        return False
    if a.schema.names != b.schema.names:
        return False
    pairs = ((x.type, y.type) for x, y in zip(a.schema, b.schema, strict=True))
    return all(x is None or y is None or x == y for x, y in pairs)


def _groups(
    window: WindowSpec, schema: Schema | None, path: str, problems: list[Problem]
) -> list[Field] | None:
    fields: list[Field] = []
    for at, column in enumerate(window.group_by):
        if schema is None:
            fields.append(Field(column, None))
        elif column in schema.names:
            fields.append(schema.field(column))
            problems += _check_key(fields[-1], f"{path}.window.groupBy[{at}]")
        else:
            what, hint = f"unknown column {column}", nearest(column, schema.names)
            where = f"{path}.window.groupBy[{at}]"
            problems.append(Problem(where, "UnknownColumn", what, hint))
    return fields if len(fields) == len(window.group_by) else None


def _aggregates(
    window: WindowSpec, schema: Schema | None, path: str, problems: list[Problem]
) -> list[Field] | None:
    where = f"{path}.window.aggregate"
    try:
        items = parse_aggregates(window.aggregate)
    except InvalidSql as error:
        problems += [p.at(where) for p in error.problems]
        return None
    if schema is None:
        return [Field(item.alias, None) for item in items]
    unknown = [f for item in items for f in unknown_columns(item.expression, schema)]
    found = list(dict.fromkeys(unknown)) + [
        Problem(
            "",
            "ReservedColumn",
            f"column {i.alias} begins with __",
            "rename it: names with __ are reserved",
        )
        for i in items
        if i.alias.startswith("__")
    ]
    found += [p for item in items for p in type_problems(item, schema)]
    problems += [p.at(where) for p in found]
    if found:
        return None
    types = infer_types([item.expression for item in items], schema)
    return [Field(item.alias, t) for item, t in zip(items, types, strict=True)]
