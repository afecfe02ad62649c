"""Parses CSV values, each of which is one row: its values are the columns, in their order.

All are parsed as one block where each surely is one row of it (`csv_reading`); otherwise in halves,
until those are found that are none. A value may end with a line end, and have others in quotes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rekindle.connectors.conversions import TextRules
from rekindle.connectors.csv_quotes import each_line_is_a_row, without_csv_field_limit
from rekindle.connectors.csv_reading import CsvOptions, dialect_of, parse_csv_block
from rekindle.connectors.line_blocks import BYTE_ORDER_MARK
from rekindle.connectors.record_values import Parsed, Part, Values, present_values
from rekindle.errors import SchemaMismatch

_SHOWN_CHARS = 120


class CsvValues:
    """Implements `rekindle.connectors.record_values.ValueFormat`."""

    rules = TextRules()

    def __init__(self, declared: pa.Schema, options: CsvOptions) -> None:
        self._strings = pa.schema([(name, pa.string()) for name in declared.names])
        self._options = options
        self._dialect = dialect_of(options)
        self._delimiter = options.delimiter.encode()
        special = ("\r", "\n", options.quote, options.escape)
        self._special = [each.encode() for each in special if each]

    def parse(self, values: Values) -> Parsed:
        present, numbers = present_values(values)
        rows, bad = list[pa.RecordBatch](), dict[int, str]()
        lines = [_without_line_end(value) for value in present]
        found = self._as_block(lines) if len(lines) > 1 else None
        if found is not None:
            return Parsed([Part(found, numbers)])
        wrong = {at: what for at, line in enumerate(lines) if (what := self._wrong_number(line))}
        left = np.delete(numbers, list(wrong))
        self._parse([line for at, line in enumerate(lines) if at not in wrong], 0, rows, bad)
        good = np.delete(left, list(bad))
        parts = [Part(pa.concat_batches(rows), good)] if rows else []
        messages = {int(left[at]): what for at, what in bad.items()}
        return Parsed(parts, messages | {int(numbers[at]): what for at, what in wrong.items()})

    def _wrong_number(self, value: bytes) -> str:
        """What `_one` would say of a value that surely has too many or too few columns, at a
        hundredth of its time; "" of others."""
        count = value.count(self._delimiter) + 1
        if count == len(self._strings) or not value or any(each in value for each in self._special):
            return ""
        try:
            value.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        return self._other_number(value, count)

    def _other_number(self, value: bytes, count: int) -> str:
        return f"{_shown(value)}: {count} values for {len(self._strings)} columns"

    def _parse(
        self, values: Sequence[bytes], first: int, rows: list[pa.RecordBatch], bad: dict[int, str]
    ) -> None:
        """Adds the rows of all values to `rows`, and the bad ones to `bad`."""
        if len(values) > 1:
            if (found := self._as_block(values)) is not None:
                rows.append(found)
                return
            half = len(values) // 2
            self._parse(values[:half], first, rows, bad)
            self._parse(values[half:], first + half, rows, bad)
        elif values:
            try:
                rows.append(self._one(values[0]))
            except SchemaMismatch as error:
                bad[first] = str(error)

    def _as_block(self, values: Sequence[bytes]) -> pa.RecordBatch | None:
        """The rows; None if some value may not be one."""
        block = b"\n".join(values)
        escape = self._options.escape
        if (
            block.count(b"\n") != len(values) - 1
            or b"\r" in block
            or BYTE_ORDER_MARK in block  # of the first value alone, Arrow would remove it
            or (escape is not None and escape.encode() in block)
            or not each_line_is_a_row(block, self._dialect)
        ):
            return None
        try:
            rows = parse_csv_block(block, self._options, self._strings, self._strings.names, "")
        except SchemaMismatch:
            return None
        return rows if rows.num_rows == len(values) else None

    def _one(self, value: bytes) -> pa.RecordBatch:
        """Raises SchemaMismatch."""
        shown = _shown(value)
        try:
            lines = io.StringIO(value.decode("utf-8"), newline="")
            with without_csv_field_limit():
                found = [row for row in self._dialect.reader(lines, strict=True) if row]
        except UnicodeDecodeError as error:
            raise SchemaMismatch(f"{shown}: {error}") from error
        except csv.Error as error:
            raise SchemaMismatch(f"{shown}: a quoted value is not closed, or: {error}") from error
        if len(found) != 1:
            what = f"{len(found)} rows" if found else "an empty value"
            raise SchemaMismatch(f"{shown}: {what} instead of one row")
        if len(found[0]) != len(self._strings):
            raise SchemaMismatch(self._other_number(value, len(found[0])))
        rows = parse_csv_block(value, self._options, self._strings, self._strings.names, shown)
        if rows.num_rows != 1:
            raise SchemaMismatch(f"{shown}: {rows.num_rows} rows instead of one row")
        return rows


def _shown(value: bytes) -> str:
    return repr(value[: 4 * _SHOWN_CHARS].decode(errors="replace")[:_SHOWN_CHARS])


def _without_line_end(value: bytes) -> bytes:
    return value.removesuffix(b"\n").removesuffix(b"\r") if value.endswith(b"\n") else value
