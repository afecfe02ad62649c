"""Parses JSON values, each of which is one object.

All values are parsed as one block where each surely is one row of it; otherwise one by one, by the
same rules (`rekindle.connectors.json_reading`), which say of each value what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.connectors.conversions import TextRules
from rekindle.connectors.json_reading import parse_json_block, raw_schema, value_parser
from rekindle.connectors.record_values import Parsed, Part, Values, present_values
from rekindle.errors import SchemaMismatch


class JsonValues:
    """Implements `rekindle.connectors.record_values.ValueFormat`."""

    rules = TextRules(binary_is_base64=True)

    def __init__(self, declared: pa.Schema) -> None:
        self._raw = raw_schema(declared)

    def parse(self, values: Values) -> Parsed:
        present, numbers = present_values(values)
        if present and (rows := _as_block(present, self._raw)) is not None:
            return Parsed([Part(rows, numbers)])
        good, parsed, bad = list[int](), list[dict[str, Any]](), dict[int, str]()
        parse = value_parser(self._raw)
        for number, value in zip(numbers.tolist(), present, strict=True):
            try:
                parsed.append(parse(value))
                good.append(number)
            except (ValueError, RecursionError) as error:
                bad[number] = str(error)
        rows = pa.RecordBatch.from_pylist(parsed, schema=self._raw)
        return Parsed([Part(rows, np.array(good, np.int64))], bad)


def _as_block(values: Sequence[bytes], raw: pa.Schema) -> pa.RecordBatch | None:
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
