"""The operator `distinct`: one row for each key within a time.

Design: docs/design/engine.md#distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rekindle.errors import Problem
from rekindle.topology.operators.kind import (
    OperatorKind,
    Stream,
    TimedResults,
    check_key,
    no_event_time,
)
from rekindle.topology.problems import nearest
from rekindle.topology.spec import DistinctSpec
from rekindle.topology.units import format_duration

MAX_WITHIN_US = 1 << 61
"""Above it, the time that is added to an event time could have more than 64 bits."""


@dataclass(frozen=True, slots=True)
class LastRows:
    """The last rows of their keys: a row is written when the watermark is `within_us` after it."""

    within_us: int

    def first_complete(self, lacks_us: int) -> int:
        return lacks_us + 1

    def first_open(self, watermark_us: int) -> int:
        return watermark_us - self.within_us + 1


class DistinctOperatorKind(OperatorKind):
    distributes_rows = True

    @property
    def spec(self) -> DistinctSpec:
        assert self.node.distinct is not None, f"operator {self.node.name} has no distinct"
        return self.node.distinct

    @property
    def needs_all_rows(self) -> bool:
        return self.spec.keep == "Last"  # First: of the rows that it reads

    def check(self, path: str) -> Iterator[Problem]:
        if len(self.node.inputs) != 1:
            what = f"distinct has one input, not {len(self.node.inputs)}"
            hint = "write an sql operator with a UNION ALL of them, and name it here"
            yield Problem(f"{path}.inputs", "InvalidDistinct", what, hint)
        if self.node.key_by:
            what = "distinct distributes rows by its keys"
            yield Problem(f"{path}.keyBy", "InvalidDistinct", what, "leave keyBy out")
        if not 0 < self.spec.within < MAX_WITHIN_US:
            what = f"within is {format_duration(self.spec.within)}"
            hint = "write for how long a row of the same key is one too many, like 1h"
            yield Problem(f"{path}.distinct.within", "InvalidDistinct", what, hint)
        if not self.spec.keys:
            what, hint = "has no keys", "write the columns that rows have to share, like [id]"
            yield Problem(f"{path}.distinct.keys", "Empty", what, hint)

    def derive(self, inputs: Mapping[str, Stream], path: str, problems: list[Problem]) -> Stream:
        streams = list(inputs.items())
        if len(streams) != 1:
            return Stream(None, None)
        ((name, stream),) = streams
        if stream.schema is None:
            return stream
        for at, key in enumerate(self.spec.keys):
            where = f"{path}.distinct.keys[{at}]"
            if key in stream.schema.names:
                problems += check_key(stream.schema.field(key), where)
            else:
                what, hint = f"unknown column {key}", nearest(key, stream.schema.names)
                problems.append(Problem(where, "UnknownColumn", what, hint))
        if stream.event_time is None:
            problems.append(no_event_time("distinct", name, stream, f"{path}.inputs[0]"))
        return stream

    def keys(self, input: int) -> tuple[str, ...]:
        return self.spec.keys

    def hint_for_hot_key(self) -> str:
        return "write more columns into keys"

    def fuses_with_input(self) -> bool:
        return (self.node.partitions or 1) == 1

    def describe(self) -> str:
        spec = self.spec
        which = f"{spec.keep.lower()} row by {', '.join(spec.keys)}"
        return f"{which} within {format_duration(spec.within)}"

    def results(self) -> TimedResults | None:
        return LastRows(self.spec.within) if self.needs_all_rows else None
