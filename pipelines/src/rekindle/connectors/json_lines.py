"""Python values as JSON text, and the comparison of files of JSON lines.

Times are ISO 8601 (UTC); doubles have their shortest exact form, and -0.0 becomes 0.0, as in
digests; decimals, NaN and infinities are strings; bytes are base64. Columns of Arrow are encoded by
`rekindle.connectors.json_writer`.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from typing import Any


def same_lines(one: bytes, two: bytes) -> bool:
    """Whether two files contain the same rows, whichever release wrote them. Raises ValueError."""
    return parse_lines(one) == parse_lines(two)


def parse_lines(data: bytes) -> list[str]:
    """The rows of a file, each in a normal form: equal rows are equal strings. Raises
    ValueError."""
    return [json_line(row) for row in parse_objects(data)]


def parse_objects(data: bytes) -> list[dict[str, Any]]:
    """The rows of a file, in the types that JSON has. Raises ValueError."""
    # `str.splitlines` would also split at U+2028 and the like, which may occur in JSON strings
    rows = [json.loads(line) for line in data.split(b"\n") if line]
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{json.dumps(row)} instead of an object")
    return rows


def json_line(row: dict[str, Any]) -> str:
    return json_value(row)


def json_value(value: Any) -> str:
    """The JSON text of a Python value."""
    return json.dumps(_jsonable(value), ensure_ascii=False, separators=(",", ":"))


def _jsonable(value: Any) -> Any:
    """A value that `json.dumps` encodes: times in ISO 8601, doubles in their shortest exact form,
    strings for what JSON does not have."""
    match value:
        case dict():
            return {str(k): _jsonable(v) for k, v in value.items()}
        case list() | tuple():
            return [_jsonable(v) for v in value]
        case dt.datetime():
            return value.isoformat().replace("+00:00", "Z")
        case dt.date() | dt.time():
            return value.isoformat()
        case dt.timedelta():
            return value // dt.timedelta(microseconds=1)
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case float():
            return value + 0.0  # −0.0 becomes 0.0
        case decimal.Decimal():
            return f"{value:f}"
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            return value
