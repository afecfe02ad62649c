"""The interface of operator kinds: what validation, compilation and drawings need to know of one.

What an operator computes is in `rekindle.engine.operators`.

Design: docs/decisions/0056-operators-and-tables.md, docs/design/compilation.md#event-time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rekindle.errors import Problem
from rekindle.topology.schema import Field, Schema, is_nested, type_to_ddl
from rekindle.topology.spec import OperatorSpec


@dataclass(frozen=True, slots=True)
class Stream:
    """A node's output. `schema` is None if it is unknown, for which a problem is reported."""

    schema: Schema | None
    event_time: str | None
    partitions: int = 1
    no_event_time: str = ""
    """Why there is no event time, if there is none."""
    at_window_end: bool | None = False
    """Whether event time is the end of a window, which is exclusive; None: for some rows only."""


class TimedResults(Protocol):
    """Results of rows of a time, by event time; of windows by their start."""

    def first_complete(self, lacks_us: int) -> int:
        """The first result that has all its rows, if rows through `lacks_us` may be missing."""
        ...

    def first_open(self, watermark_us: int) -> int:
        """The first result that is not written yet."""
        ...


@dataclass(frozen=True)
class OperatorKind(ABC):
    """An operator that has the field of this kind (`OperatorSpec.KINDS`)."""

    node: OperatorSpec

    distributes_rows: ClassVar[bool] = False
    """Whether it always has keys by which rows are distributed."""
    not_in_id: ClassVar[tuple[str, ...]] = ()
    """Fields of its spec that have no effect on what is computed, by their names in a resource."""
    inherits_partitions: ClassVar[bool] = False
    """Whether it has the partitions of its input, if it has neither keys nor `partitions`."""
    many_rows: ClassVar[int] = 10_000
    """How many rows of an epoch in one partition cost more than an epoch does without rows."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether a result without one of its rows would be wrong, and not only be missing: if it
        begins later than the topology, it is told from which event time on it has all rows."""
        return False

    @property
    def blocks(self) -> bool:
        """Whether no epoch is processed without one of its inputs, also if results may be
        tentative."""
        return False

    def check(self, path: str) -> Iterator[Problem]:
        """Problems of the kind's fields; `path`: of the operator."""
        yield from ()

    @abstractmethod
    def derive(self, inputs: Mapping[str, Stream], path: str, problems: list[Problem]) -> Stream:
        """Its output, but for `partitions`, from those of its inputs that are known; adds the
        problems of its columns."""
        ...

    def keys(self, input: int) -> tuple[str, ...]:
        """The columns of the input with this index by whose hash its rows are distributed over the
        partitions; (): they are not."""
        return self.node.key_by

    def hint_for_hot_key(self) -> str:
        """What to do if most rows have one key."""
        return "write more columns into keyBy"

    def fuses_with_input(self) -> bool:
        """Whether it may run in the segment of its only input, if partitions and replicas agree."""
        return not self.node.key_by

    @abstractmethod
    def describe(self) -> str:
        """What it does, for a drawing."""
        ...

    def results(self) -> TimedResults | None:
        """Which results lack rows; None: what lacks a row of an input is one row of its own."""
        return None

    def reach_us(self) -> int:
        """How much later than a row that it lacks is the event time of the last row of its output
        that may lack something for it."""
        return 0


def common(values: list[str | None]) -> str | None:
    return values[0] if values and all(v == values[0] for v in values) else None


def no_event_time(what: str, name: str, stream: Stream, path: str) -> Problem:
    """Of an input without event time; `what` needs it."""
    why = f": {stream.no_event_time}" if stream.no_event_time else ""
    message = f"{what} needs event time, and input {name} has none{why}"
    hint = (
        "set eventTime of the source, and output its column in every SELECT, under any name and "
        "at the same position"
    )
    return Problem(path, "NoEventTime", message, hint)


def check_key(field: Field, path: str) -> list[Problem]:
    """Arrays and structs have no canonical form for hashing or grouping."""
    if not is_nested(field.type):
        return []
    what = f"column {field.name} is {type_to_ddl(field.type)}, which cannot be a key"
    return [Problem(path, "NotAKey", what, "use a field or an element of it, with sql")]
