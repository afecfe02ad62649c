"""Decodes JSON values, each of which is one object, to columns of a declared schema.

The values of a message queue are no lines of a file: one may be bad, and the others are rows all
the same. So all values are parsed as one block where each surely is one row of it; otherwise one by
one, by the same rules (`rekindle.connectors.json_reading`), which say of each value what is wrong
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rekindle.connectors.conversions import TextRules, convert_to_field
from rekindle.connectors.event_time import with_event_time
from rekindle.connectors.json_reading import parse_json_block, raw_schema, value_parser
from rekindle.errors import SchemaMismatch
from rekindle.topology.sql.event_time import Expression

BLOCK_BYTES = 16 << 20
"""Bytes of values that are parsed together."""
_RULES = TextRules(binary_is_base64=True)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A row for each value, in their order; those of bad values are NULL. `bad`: what is wrong with
    them, by their number."""

    rows: pa.RecordBatch
    bad: dict[int, str] = field(default_factory=dict)


class JsonValues:
    """Decodes to `schema`, of which the last column is the value of `event_time`, if that is
    given."""

    def __init__(self, schema: pa.Schema, event_time: Expression | None = None) -> None:
        self._schema = schema
        self._event_time = event_time
        self._declared = pa.schema(list(schema)[: len(schema) - (event_time is not None)])
        self._raw = raw_schema(self._declared)

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """None has a row of NULLs."""
        parts, bad, first = [], dict[int, str](), 0
        for chunk in _chunks(values):
            raw, found = _parse(chunk, self._raw)
            rows, unconverted = _row_by_row_if_needed(raw, self._converted, self._schema)
            bad |= {first + at: what for at, what in (unconverted | found).items()}
            parts.append(rows)
            first += len(chunk)
        return Decoded(pa.concat_batches(parts) if parts else _nulls(self._schema, 0), bad)

    def _converted(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Raises SchemaMismatch."""
        columns = [
            convert_to_field(raw.column(at), declared, f"column {declared.name}", 0, _RULES)
            for at, declared in enumerate(self._declared)
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._declared)
        if self._event_time is None:
            return rows
        [(_, rows)] = with_event_time(iter([(0, rows)]), self._event_time, self._schema, "value")
        return rows


def _chunks(values: Sequence[bytes | None]) -> list[Sequence[bytes | None]]:
    """Of about BLOCK_BYTES. They depend on the values alone."""
    chunks, first, size = list[Sequence[bytes | None]](), 0, 0
    for at, value in enumerate(values):
        size += len(value or b"")
        if size > BLOCK_BYTES and at > first:
            chunks.append(values[first:at])
            first, size = at, len(value or b"")
    return [*chunks, values[first:]] if first < len(values) else chunks


def _parse(values: Sequence[bytes | None], raw: pa.Schema) -> tuple[pa.RecordBatch, dict[int, str]]:
    present = [value for value in values if value is not None] if None in values else values
    if present and (rows := _as_block(present, raw)) is not None:
        if len(present) == len(values):
            return rows, {}
        numbers = iter(range(len(present)))
        places = pa.array([None if v is None else next(numbers) for v in values], pa.int64())
        return rows.take(places), {}
    bad: dict[int, str] = {}
    parsed: list[dict[str, Any]] = []
    nothing, parse = dict.fromkeys(raw.names), value_parser(raw)
    for at, value in enumerate(values):
        try:
            parsed.append(nothing if value is None else parse(value))
        except (ValueError, RecursionError) as error:
            bad[at] = str(error)
            parsed.append(nothing)
    return pa.RecordBatch.from_pylist(parsed, schema=raw), bad


def _as_block(values: Sequence[Any], raw: pa.Schema) -> pa.RecordBatch | None:
    """The rows of all values; None if some value may not be one object. A value that begins with a
    brace, ends with one and has no line end is at least one row, or an error: so if there are as
    many rows as values, each is one."""
    block = b"\n".join(values)
    breaks = len(values) - 1
    if (
        block[:1] != b"{"
        or block[-1:] != b"}"
        or block.count(b"\n") != breaks
        or block.count(b"}\n{") != breaks
    ):
        return None
    try:
        rows = parse_json_block(block, raw, 1, "")
    except SchemaMismatch:
        return None
    return rows if rows.num_rows == len(values) else None


def _row_by_row_if_needed(
    rows: pa.RecordBatch,
    convert: Callable[[pa.RecordBatch], pa.RecordBatch],
    schema: pa.Schema,
) -> tuple[pa.RecordBatch, dict[int, str]]:
    """The converted rows; halves what cannot be converted, until the rows are found that cannot."""
    try:
        return convert(rows), {}
    except SchemaMismatch as error:
        if rows.num_rows == 1:
            return _nulls(schema, 1), {0: str(error)}
    half = rows.num_rows // 2
    first, bad = _row_by_row_if_needed(rows.slice(0, half), convert, schema)
    second, more = _row_by_row_if_needed(rows.slice(half), convert, schema)
    return pa.concat_batches([first, second]), bad | {half + at: w for at, w in more.items()}


def _nulls(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(rows, f.type) for f in schema], schema=schema)
