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

from rekindle.connectors.conversions import TextRules, convert_to_field
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
            rows, unconverted = self._in_halves(part.rows)
            numbers = np.arange(len(values)) if part.numbers is None else part.numbers
            bad |= {int(numbers[at]): what for at, what in unconverted.items()}
            places[numbers] = np.arange(first, first + len(numbers))
            converted.append(rows)
            first += len(numbers)
        if len(converted) == 1 and first == len(values):
            return Decoded(converted[0], bad)
        rows = pa.concat_batches([*converted, self._nulls(1)])
        return Decoded(rows.take(pa.array(np.where(places < 0, first, places))), bad)

    def _in_halves(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """The converted rows; halves what cannot be converted, until the rows are found that
        cannot."""
        if not rows.num_rows:  # of types that are not read, perhaps
            return self._nulls(0), {}
        try:
            return self._converted(rows), {}
        except SchemaMismatch as error:
            if rows.num_rows == 1:
                return self._nulls(1), {0: str(error)}
        half = rows.num_rows // 2
        first, bad = self._in_halves(rows.slice(0, half))
        second, more = self._in_halves(rows.slice(half))
        return pa.concat_batches([first, second]), bad | {half + at: w for at, w in more.items()}

    def _converted(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Raises SchemaMismatch."""
        columns = [
            convert_to_field(
                raw.column(at), declared, f"column {declared.name}", 0, self._format.rules
            )
            for at, declared in enumerate(self._declared)
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._declared)
        if self._event_time is None:
            return rows
        [(_, rows)] = with_event_time(iter([(0, rows)]), self._event_time, self._schema, "value")
        return rows

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
