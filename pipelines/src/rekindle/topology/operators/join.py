"""The operator `join`: pairs of rows of two inputs.

Design: docs/design/engine.md#joins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rekindle.errors import Problem
from rekindle.topology.operators.kind import (
    OperatorKind,
    Stream,
    TimedResults,
    check_key,
    no_event_time,
)
from rekindle.topology.problems import InvalidSql
from rekindle.topology.schema import Schema
from rekindle.topology.spec import JoinSpec
from rekindle.topology.sql.joins import (
    JoinAnalysis,
    JoinCondition,
    all_columns,
    analyze_join,
    key_problems,
    parse_condition,
)
from rekindle.topology.units import SECOND, format_duration

UNMATCHED: Mapping[str, tuple[int, ...]] = {
    "Left": (0,),
    "Right": (1,),
    "Full": (0, 1),
    "Anti": (0,),
}
"""By type, the inputs of which rows that match none are written."""
_EVENT_TIMES: Mapping[str, tuple[int, ...]] = {"Inner": (0, 1), "Right": (1,), "Full": ()}
"""By type, the inputs whose event time no row lacks; (0,) for the others."""
MAX_BOUND_US = 10_000_000 * 86_400 * SECOND
"""Far above it, the bounds of the rows that match one could have more than 64 bits."""
_WITHIN_HINT = (
    "write how far apart the event times of two rows may be: within: 1h, or before and after"
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much earlier and later than the first row's event time that of the second may be."""

    before_us: int = 0
    after_us: int = 0


@dataclass(frozen=True, slots=True)
class UnmatchedRows:
    """Rows that match none of those from `early_us` before to `late_us` after them."""

    early_us: int
    late_us: int

    def first_complete(self, lacks_us: int) -> int:
        return lacks_us + self.early_us + 1

    def first_open(self, watermark_us: int) -> int:
        return watermark_us - self.late_us


class JoinOperatorKind(OperatorKind):
    distributes_rows = True
    many_rows = 1_000  # of one key, each matches all that are kept
    not_in_id = (JoinSpec.name_of("when_missing"),)

    def hint_for_hot_key(self) -> str:
        return "write more equalities into on, or a shorter within"

    @property
    def blocks(self) -> bool:
        return self.spec.when_missing == "Block"

    @property
    def spec(self) -> JoinSpec:
        assert self.node.join is not None, f"operator {self.node.name} has no join"
        return self.node.join

    @cached_property
    def condition(self) -> JoinCondition:
        """Raises InvalidSql."""
        return parse_condition(self.spec.on, self.node.inputs)

    @property
    def needs_all_rows(self) -> bool:
        return self.spec.type in UNMATCHED

    @property
    def select(self) -> str:
        return self.spec.select or all_columns(self._selected(self.node.inputs))

    def _selected(self, inputs: Sequence[str]) -> Sequence[str]:
        """The inputs whose columns the output may have."""
        return inputs[:1] if self.spec.type in ("Semi", "Anti") else inputs

    def bounds(self, event_times: Sequence[str | None]) -> Bounds | None:
        """`event_times`: those of the inputs. None: two rows may be any time apart."""
        join = self.spec
        if join.within is not None:
            return Bounds(join.within, join.within)
        if join.before is not None or join.after is not None:
            return Bounds(join.before or 0, join.after or 0)
        return Bounds() if tuple(event_times) in self.condition.equal else None

    def results(self) -> TimedResults | None:
        if not self.needs_all_rows:
            return None
        bounds = self.bounds(()) or Bounds()  # without any, it has an equality of event times
        before, after = bounds.before_us, bounds.after_us
        of_sides = [((before, after), (after, before))[at] for at in UNMATCHED[self.spec.type]]
        early, late = (max(us) for us in zip(*of_sides, strict=True))
        return UnmatchedRows(early, late)

    def analysis(self, schemas: Sequence[Schema]) -> JoinAnalysis:
        by_name = dict(zip(self.node.inputs, schemas, strict=True))
        return analyze_join(self.spec.on, self.select, by_name, self._selected(self.node.inputs))

    def event_time(self, analysis: JoinAnalysis, event_times: Sequence[str | None]) -> int | None:
        """The index of the column that is the event time of the output: a copy of that of the first
        input, or else of that of the second."""
        for at in _EVENT_TIMES.get(self.spec.type, (0,)):
            name = event_times[at]
            copies = [i for i, column in enumerate(analysis.copies) if column == (at, name)]
            if copies:
                return copies[0]
        return None

    def check(self, path: str) -> Iterator[Problem]:
        join, where = self.spec, f"{path}.join"
        if len(self.node.inputs) != 2:
            what = f"a join has two inputs, not {len(self.node.inputs)}"
            hint = "join two of them, and the result with the next one"
            yield Problem(f"{path}.inputs", "InvalidJoin", what, hint)
        if self.node.key_by:
            what = "a join distributes rows by the columns that have to be equal"
            yield Problem(f"{path}.keyBy", "InvalidJoin", what, "leave keyBy out")
        if join.within is not None and (join.before is not None or join.after is not None):
            what = "has within, and before or after"
            hint = "write within, for both directions, or before and after"
            yield Problem(where, "InvalidJoin", what, hint)

        for name in ("within", "before", "after"):
            if (getattr(join, name) or 0) > MAX_BOUND_US:
                what = f"{name} is {format_duration(getattr(join, name))}"
                hint = f"write at most {format_duration(MAX_BOUND_US)}"
                yield Problem(f"{where}.{name}", "InvalidJoin", what, hint)

    def derive(self, inputs: Mapping[str, Stream], path: str, problems: list[Problem]) -> Stream:
        where = f"{path}.join"
        try:
            condition = self.condition
        except InvalidSql as error:
            problems += [p.at(f"{where}.on") for p in error.problems]
            return Stream(None, None)
        if not condition.equal:
            what = "has no equality between a column of each input"
            hint = f"write {' = '.join(f'{name}.column' for name in self.node.inputs[:2])}"
            problems.append(Problem(f"{where}.on", "InvalidJoin", what, hint))
        for at, name in enumerate(self.node.inputs):
            stream = inputs.get(name)
            if stream is not None and stream.schema is not None and stream.event_time is None:
                problems.append(no_event_time("a join", name, stream, f"{path}.inputs[{at}]"))
        streams = [inputs[name] for name in self.node.inputs if name in inputs]
        schemas = [stream.schema for stream in streams if stream.schema is not None]
        if len(self.node.inputs) != 2 or len(schemas) != 2:
            return Stream(None, None)
        event_times = [stream.event_time for stream in streams]
        if self.bounds(event_times) is None and None not in event_times:
            problems.append(Problem(where, "InvalidJoin", "has no within", _WITHIN_HINT))
        return self._output(streams, schemas, where, problems)

    def _key_problems(self, schemas: Sequence[Schema]) -> list[Problem]:
        found = key_problems(self.condition, schemas)
        for names in self.condition.equal if not found else ():
            for name, schema in zip(names, schemas, strict=True):
                found += check_key(schema.field(name), "")
        return found

    def _output(
        self,
        streams: Sequence[Stream],
        schemas: Sequence[Schema],
        where: str,
        problems: list[Problem],
    ) -> Stream:
        by_name = dict(zip(self.node.inputs, schemas, strict=True))
        checked = analyze_join(self.spec.on, "1 AS n", by_name, self.node.inputs)
        wrong = checked.problems or tuple(self._key_problems(schemas))
        problems += [p.at(f"{where}.on") for p in wrong]
        if wrong:
            return Stream(None, None)
        analysis = self.analysis(schemas)
        field = f"{where}.select" if self.spec.select else where
        problems += [p.at(field) for p in analysis.problems]
        if analysis.output is None:
            return Stream(None, None)
        event_times = [stream.event_time for stream in streams]
        at = self.event_time(analysis, event_times)
        copied = analysis.copies[at] if at is not None else None
        if at is None or copied is None:
            why = self._why_no_event_time(event_times)
            return Stream(analysis.output, None, no_event_time=why)
        ends = streams[copied[0]].at_window_end
        return Stream(analysis.output, analysis.output.names[at], at_window_end=ends)

    def _why_no_event_time(self, event_times: Sequence[str | None]) -> str:
        name, sides = self.node.name, _EVENT_TIMES.get(self.spec.type, (0,))
        if not sides:
            return f"a row of {name}, a {self.spec.type} join, may lack either event time"
        names = " or ".join(f"{self.node.inputs[at]}.{event_times[at]}" for at in sides)
        return f"{name} does not select {names}, an event time"

    def keys(self, input: int) -> tuple[str, ...]:
        try:
            return tuple(names[input] for names in self.condition.equal)
        except InvalidSql:
            return ()

    def describe(self) -> str:
        join = self.spec
        times = {"within": join.within, "before": join.before, "after": join.after}
        given = " ".join(f"{n} {format_duration(us)}" for n, us in times.items() if us is not None)
        return " ".join(f"{join.type.lower()} join on {join.on} {given}".split())

    def reach_us(self) -> int:
        join = self.spec
        return max(join.within or 0, join.before or 0, join.after or 0)
