"""Values of a message queue as columns of a declared schema, whatever their format.

The values are no lines of a file: one may be bad, and the others are rows all the same. A format
(`ValueFormat`) parses many values at once to the columns that it has, and says which it could not;
here they are converted to the declared types by the table of `rekindle.connectors.conversions`. A
value that does not convert is bad, too. What is bad depends on the value alone, never on those
beside it: replicas and replays drop the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.connectors.conversions import TextRules
from rekindle.connectors.each_value import convert_each
from rekindle.connectors.event_time import with_event_time
from rekindle.errors import SchemaMismatch
from rekindle.topology.sql.event_time import Expression

BLOCK_BYTES = 16 << 20
"""Bytes of values that are parsed together."""
Values = Sequence[bytes | None]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A row for each value, in their order; those of bad values are NULL. `bad`: what is wrong with
    them, by their number."""

    rows: pa.RecordBatch
    bad: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of values with these `numbers`, which ascend; None: of all values."""

    rows: pa.RecordBatch
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """Each value is in one part, or is None, or `bad`, which says what is wrong with it."""

    parts: Sequence[Part]
    bad: Mapping[int, str] = field(default_factory=dict)


class ValueFormat(Protocol):
    """Parses values to the columns of the declared schema, each of any type that the table of
    conversions has."""

    @property
    def rules(self) -> TextRules: ...

    def parse(self, values: Values) -> Parsed:
        """At least one value. Raises SourceFailed if what is missing is no property of the values,
        such as a schema whose registry is away."""
        ...


class ValueDecoder:
    """Decodes to `schema`, of which the last column is the value of `event_time`, if that is
    given."""

    def __init__(
        self, format: ValueFormat, schema: pa.Schema, event_time: Expression | None = None
    ) -> None:
        self._format = format
        self._schema = schema
        self._event_time = event_time
        self._declared = declared_schema(schema, event_time)

    def decode(self, values: Values) -> Decoded:
        """None has a row of NULLs. Raises as `ValueFormat.parse`."""
        rows, bad = [], dict[int, str]()
        for chunk in chunks(values):
            decoded = self._decode(values[chunk])
            bad |= {chunk.start + at: what for at, what in decoded.bad.items()}
            rows.append(decoded.rows)
        return Decoded(pa.concat_batches(rows) if rows else self._nulls(0), bad)

    def _decode(self, values: Values) -> Decoded:
        parsed = self._format.parse(values)
        bad, converted = dict(parsed.bad), list[pa.RecordBatch]()
        places, first = np.full(len(values), -1, np.int64), 0
        for part in parsed.parts:
            numbers = np.arange(len(values)) if part.numbers is None else part.numbers
            kept, rows, unconverted = self._convert(part.rows)
            bad |= {int(numbers[at]): what for at, what in unconverted.items()}
            places[numbers[kept]] = np.arange(first, first + len(kept))
            converted.append(rows)
            first += len(kept)
        if len(converted) == 1 and first == len(values):
            return Decoded(converted[0], bad)
        rows = pa.concat_batches([*converted, self._nulls(1)])
        return Decoded(rows.take(pa.array(np.where(places < 0, first, places))), bad)

    def _convert(self, raw: pa.RecordBatch) -> tuple[Numbers, pa.RecordBatch, dict[int, str]]:
        """The numbers of the rows that can be converted, these rows, and what is wrong with the
        others."""
        kept = np.arange(raw.num_rows)
        if not raw.num_rows:  # of types that are not read, perhaps
            return kept, self._nulls(0), {}
        columns, bad = list[pa.Array](), dict[int, str]()
        for at, declared in enumerate(self._declared):
            where = f"column {declared.name}"
            values = convert_each(raw.column(at), declared, where, self._format.rules)
            columns.append(values.column)
            bad = {**values.bad, **bad}  # the first wrong column is reported
        rows = pa.RecordBatch.from_arrays(columns, schema=self._declared)
        if bad:
            kept = np.delete(kept, list(bad))
            rows = rows.take(pa.array(kept))
        if self._event_time is None:
            return kept, rows, bad
        parts, timeless = list[pa.RecordBatch](), dict[int, str]()
        self._add_event_time(self._event_time, rows, 0, parts, timeless)
        bad |= {int(kept[at]): what for at, what in timeless.items()}
        return np.delete(kept, list(timeless)), pa.concat_batches([*parts, self._nulls(0)]), bad

    def _add_event_time(
        self,
        expression: Expression,
        rows: pa.RecordBatch,
        first: int,
        parts: list[pa.RecordBatch],
        bad: dict[int, str],
    ) -> None:
        """Adds the rows with their event time to `parts`. Halves what has none, until the rows are
        found that have none; `first`: the number of the first row."""
        if not rows.num_rows:
            return
        try:
            timed = with_event_time(iter([(0, rows)]), expression, self._schema, "value")
            parts += [part for _, part in timed]
        except SchemaMismatch as error:
            if rows.num_rows == 1:
                bad[first] = str(error)
                return
            half = rows.num_rows // 2
            self._add_event_time(expression, rows.slice(0, half), first, parts, bad)
            self._add_event_time(expression, rows.slice(half), first + half, parts, bad)

    def _nulls(self, rows: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [pa.nulls(rows, f.type) for f in self._schema], schema=self._schema
        )


def declared_schema(schema: pa.Schema, event_time: Expression | None) -> pa.Schema:
    """The columns of the values: all but the last one, if `event_time` computes that."""
    return pa.schema(list(schema)[: len(schema) - (event_time is not None)])


def present_values(values: Values) -> tuple[list[bytes], Numbers]:
    """Those that are not None, and their numbers."""
    numbers = [at for at, value in enumerate(values) if value is not None]
    return [value for value in values if value is not None], np.array(numbers, np.int64)


def chunks(values: Values, most_bytes: int = BLOCK_BYTES) -> list[slice]:
    """Of about so many bytes. They depend on the values alone."""
    found, first, size = list[slice](), 0, 0
    for at, value in enumerate(values):
        size += len(value or b"")
        if size > most_bytes and at > first:
            found.append(slice(first, at))
            first, size = at, len(value or b"")
    return [*found, slice(first, len(values))] if first < len(values) else found
