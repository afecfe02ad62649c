"""The operator `window`: aggregates over windows of event time. The kinds of windows are in
`rekindle.topology.windows`.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rekindle.errors import Problem
from rekindle.topology.operators.kind import OperatorKind, Stream, check_key, no_event_time
from rekindle.topology.problems import InvalidSql, nearest
from rekindle.topology.schema import Field, Scalar, Schema
from rekindle.topology.spec import OperatorSpec, WindowSpec
from rekindle.topology.sql.aggregates import parse_aggregates, type_problems
from rekindle.topology.sql.columns import unknown_columns
from rekindle.topology.sql.inference import infer_types
from rekindle.topology.windows.kind import END, START, Windows
from rekindle.topology.windows.registry import check_window, windows_of


class WindowOperatorKind(OperatorKind):
    @property
    def needs_all_rows(self) -> bool:
        return self._window.rows is None  # these are counted from the first one that is read

    @property
    def _window(self) -> WindowSpec:
        assert self.node.window is not None, f"operator {self.node.name} has no window"
        return self.node.window

    def check(self, path: str) -> Iterator[Problem]:
        yield from check_window(self._window, f"{path}.window")

    def derive(self, inputs: Mapping[str, Stream], path: str, problems: list[Problem]) -> Stream:
        window = self._window
        for at, key in enumerate(self.node.key_by):
            if key not in window.group_by:
                what = f"keyBy column {key} is not in the window's groupBy"
                hint = "a group must be in one partition: add it to groupBy, or drop it from keyBy"
                problems.append(Problem(f"{path}.keyBy[{at}]", "KeyNotGrouped", what, hint))
        schema = _output(self.node, window, inputs, path, problems)
        ends = {s.at_window_end for s in inputs.values()} or {False}
        if window.rows is None:
            ends = {True}
        return Stream(schema, END, at_window_end=ends.pop() if len(ends) == 1 else None)

    def hint_for_hot_key(self) -> str:
        window = self._window
        if more := [column for column in window.group_by if column not in self.node.key_by]:
            return f"add {' and '.join(more)} to keyBy"
        again = ", and combine its groups in a second window" if window.size is not None else ""
        return f"write one more column into groupBy and keyBy{again}"

    def describe(self) -> str:
        window = self._window
        keys = f" by {', '.join(window.group_by)}" if window.group_by else ""
        return f"window {windows_of(window).describe()}{keys}: {window.aggregate}"

    def results(self) -> Windows:
        return windows_of(self._window)

    def reach_us(self) -> int:
        return self.results().reach_us


def _output(
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
            problems.append(no_event_time("a window", name, stream, f"{path}.inputs[{at}]"))
        elif stream.at_window_end is None:
            problems.append(_two_event_times(name, f"{path}.inputs[{at}]"))
    schema = _same_schema(inputs, f"{path}.inputs", problems)
    event_times = {stream.event_time for stream in inputs.values()}
    groups = _groups(window, schema, event_times, path, problems)
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
    window: WindowSpec,
    schema: Schema | None,
    event_times: set[str | None],
    path: str,
    problems: list[Problem],
) -> list[Field] | None:
    fields: list[Field] = []
    for at, column in enumerate(window.group_by):
        if window.rows is not None and column in event_times:
            what = f"column {column} is event time: a window of rows keeps each group for good"
            hint = "group by columns whose values come back, or use size"
            problems.append(Problem(f"{path}.window.groupBy[{at}]", "InvalidWindow", what, hint))
        if schema is None:
            fields.append(Field(column, None))
        elif column in schema.names:
            fields.append(schema.field(column))
            problems += check_key(fields[-1], f"{path}.window.groupBy[{at}]")
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
