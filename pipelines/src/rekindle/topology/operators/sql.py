"""The operator `sql`: row by row.

Design: docs/design/compilation.md#row-wise-sql, docs/design/compilation.md#event-time.
"""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.errors import Problem
from rekindle.topology.operators.kind import OperatorKind, Stream, common
from rekindle.topology.schema import Scalar
from rekindle.topology.sql.row_wise import SelectAnalysis, SqlAnalysis, check_sql


class SqlOperatorKind(OperatorKind):
    inherits_partitions = True

    def derive(self, inputs: Mapping[str, Stream], path: str, problems: list[Problem]) -> Stream:
        analysis = check_sql(self.node.sql or "", {name: s.schema for name, s in inputs.items()})
        if len(inputs) == len(self.node.inputs):  # else an unknown input has been reported
            problems += [p.at(f"{path}.sql") for p in analysis.problems]
        event_time = _kept_event_time(analysis, inputs)
        no_event_time = "" if event_time else _why_no_event_time(self.node.name, analysis, inputs)
        ends = {s.at_window_end for s in inputs.values()} or {False}
        return Stream(
            analysis.schema,
            event_time,
            no_event_time=no_event_time,
            at_window_end=ends.pop() if len(ends) == 1 else None,
        )

    def describe(self) -> str:
        return " ".join((self.node.sql or "").split())


def _kept_event_time(analysis: SqlAnalysis, inputs: Mapping[str, Stream]) -> str | None:
    """The event time of the output: a column whose position has event time in every SELECT, since
    UNION ALL goes by position. If there are several, the one that is named like the event time of
    the first SELECT's input, else the first."""
    if analysis.schema is None:
        return common([s.event_time for s in inputs.values()])
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
