"""Reads JSON lines as batches of a declared schema, exactly.

Arrow's reader parses a block of lines at once, where it can be trusted: it may not fail, read an
infinity, or be given what it reads differently than Python does (a null as an object, bad UTF-8, a
DECIMAL with an exponent or too many digits, lines of many brackets). Python parses other blocks
value by value, so a line is read alike whatever is beside it. Python also accepts NaN and
infinities, which JSON does not have: as strings or as bare words, as the JSON sink and most other
writers write them.
Decimals are read from numbers and strings, never through a double. Errors name the line.

A declared field that no object of a file has is an error (a misspelt name would be NULL in every
row). A field that only some objects lack is NULL in those. Undeclared fields are not read.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from rekindle.arrow_types import arrow_to_ddl
from rekindle.connectors.conversions import TextRules, convert, decimal_of, is_number
from rekindle.connectors.json_fields import DeclaredFields, require_in_some_object
from rekindle.connectors.line_blocks import (
    BYTE_ORDER_MARK,
    MAX_LINE_BYTES,
    LineTooLong,
    blocks_of_lines,
)
from rekindle.errors import SchemaMismatch

_NON_FINITE = {
    "NaN": math.nan,
    "Infinity": math.inf,
    "+Infinity": math.inf,
    "-Infinity": -math.inf,
    "INF": math.inf,
    "+INF": math.inf,
    "-INF": -math.inf,
}
"""Spellings of doubles that JSON does not have; the sink writes the first spelling of each."""
_SHOWN_CHARS = 120
"""Characters of a line that a message shows."""
_MOST_DIGITS = 400
_RULES = TextRules(binary_is_base64=True)
_SHOWN_BYTES = 4 << 10
"""Bytes of a line that are decoded to get these characters."""
_WHITESPACE = " \t\r\n"
_DECIMAL_FOR_PYTHON = re.compile(rb"\d\.?[eE][+-]?\d|\d{39}")
"""What may be a number with an exponent, or with more digits than a DECIMAL has on either side of
its point: Arrow's reader multiplies it by powers of ten without a check that the product fits."""
_WIDE_DECIMAL = pa.decimal256(76, 38)
"""Holds any number that is left, and more."""
_MOST_BRACKETS = 400
"""In a line that Arrow parses: it allows deeper nesting than Python, and none without bound."""
_MOST_DEPTH = 400
"""Of what Python parses, or less than that on a deep stack: so values are refused before."""
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NULL_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*null")
_NULL_AFTER_OBJECT = re.compile(rb"\}[ \t\r\n]*null")


class _BadValue(ValueError):
    """A value that is not of its declared type."""


class _Number(str):
    """The text of a number with a fraction or an exponent."""

    __slots__ = ()


class _NonFinite(str):
    """NaN, Infinity or -Infinity without quotes."""

    __slots__ = ()


class _MinusZero(int):
    """0, of which a double has the sign."""

    __slots__ = ()


_MINUS_ZERO = _MinusZero()


class _Object(dict[str, Any]):
    """An object that remembers which of its fields occur twice."""

    __slots__ = ("twice",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = {n for n in names if names.count(n) > 1} if len(self) < len(pairs) else set()


def _parse_int(text: str) -> int | _Number:
    """Python refuses to parse more digits, which no type has."""
    if text == "-0":
        return _MINUS_ZERO
    return int(text) if len(text) <= _MOST_DIGITS else _Number(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_Object,
    parse_float=_Number,
    parse_int=_parse_int,
    parse_constant=_NonFinite,
)


def raw_schema(schema: pa.Schema) -> pa.Schema:
    """The schema as JSON represents it: times and binaries are strings."""
    return pa.schema([_raw_field(f) for f in schema])


def _raw_field(f: pa.Field) -> pa.Field:
    return pa.field(f.name, _raw_type(f.type))


def _raw_type(data_type: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_struct(data_type):
        return pa.struct([_raw_field(f) for f in data_type])
    if types.is_list(data_type) or types.is_large_list(data_type):
        return pa.list_(_raw_type(data_type.value_type))
    as_text = (
        types.is_temporal(data_type)
        or types.is_binary(data_type)
        or types.is_large_string(data_type)
    )
    return pa.string() if as_text else data_type


def read_json_lines(
    open_file: Callable[[], AbstractContextManager[BinaryIO]],
    schema: pa.Schema,
    block_bytes: int,
    where: str,
) -> Iterator[pa.RecordBatch]:
    """The lines of a file, in `raw_schema(schema)`. A file without lines has no rows. Raises
    SchemaMismatch, with the number of the line, and what the file raises."""
    return (batch for _, _, batch in read_json_blocks(open_file, schema, block_bytes, where))


def read_json_blocks(
    open_file: Callable[[], AbstractContextManager[BinaryIO]],
    schema: pa.Schema,
    block_bytes: int,
    where: str,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[tuple[int, bytes, pa.RecordBatch]]:
    """The batches of `read_json_lines`, each with the offset and the bytes of its lines. Raises
    LineTooLong for a line of more than `max_line_bytes`."""
    raw = raw_schema(schema)
    fields = DeclaredFields(raw)
    line = 1
    with open_file() as file:
        try:
            for offset, block in blocks_of_lines(file, block_bytes, max_line_bytes):
                batch = parse_json_block(block, raw, line, where)
                line += block.count(b"\n")
                fields.observe(batch)
                yield offset, block, batch
        except LineTooLong as e:
            raise LineTooLong(f"{where}, line {line} or later: {e}; write one object a line") from e
    if absent := fields.never_seen():
        # Lines that only Arrow can parse are not checked.
        with open_file() as file, contextlib.suppress(ValueError, RecursionError):
            lines = (line.removeprefix(BYTE_ORDER_MARK).decode("utf-8") for line in file)
            require_in_some_object((row for line in lines for row in _objects(line)), absent, where)


def parse_json_block(block: bytes, raw: pa.Schema, first_line: int, where: str) -> pa.RecordBatch:
    """The rows of whole lines. Raises SchemaMismatch."""
    batch = _by_arrow(block, raw)
    return _by_python(block, raw, first_line, where) if batch is None else batch


def _by_arrow(block: bytes, raw: pa.Schema) -> pa.RecordBatch | None:
    """The rows as Arrow parses them; None if Arrow cannot parse the block, or may read it otherwise
    than Python."""
    if not block.strip():
        return _no_rows(raw)
    wide = pa.schema([f.with_type(_widened(f.type)) for f in raw])
    if _may_have_null_line(block) or _has_deep_line(block) or not _is_utf8(block):
        return None
    # An escape may stand for an E.
    if wide != raw and (b"\\" in block or _DECIMAL_FOR_PYTHON.search(block)):
        return None
    parse = pa_json.ParseOptions(explicit_schema=wide, unexpected_field_behavior="ignore")
    read = pa_json.ReadOptions(block_size=len(block) + 1, use_threads=False)
    try:
        table = pa_json.read_json(pa.BufferReader(block), read_options=read, parse_options=parse)
        batches = table.select(raw.names).combine_chunks().to_batches()
        if not batches:
            return _no_rows(raw)
        batches[0].validate(full=True)  # escapes may stand for what is no UTF-8
        columns = [convert(c, f.type, _RULES) for c, f in zip(batches[0], raw, strict=True)]
    except ValueError:  # ArrowInvalid is one
        return None
    batch = pa.RecordBatch.from_arrays(columns, schema=raw)
    return None if any(_has_infinity(column) for column in columns) else batch


def _widened(data_type: pa.DataType) -> pa.DataType:
    """With a decimal type that Arrow's reader need not round to."""
    types = pa.types
    if types.is_decimal(data_type):
        return _WIDE_DECIMAL
    if types.is_struct(data_type):
        return pa.struct([f.with_type(_widened(f.type)) for f in data_type])
    if types.is_list(data_type):
        return pa.list_(_widened(data_type.value_type))
    return data_type


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _has_deep_line(block: bytes) -> bool:
    lines = (line for line in block.split(b"\n") if len(line) > 2 * _MOST_BRACKETS)
    return any(line.count(b"[") + line.count(b"{") > _MOST_BRACKETS for line in lines)


def _may_have_null_line(block: bytes) -> bool:
    """Whether there is a null in place of an object (or `} null` in a string). Arrow's reader would
    read it as a row of NULLs, or crash with a segmentation fault if no object is before it."""
    return b"null" in block and bool(_NULL_FIRST.match(block) or _NULL_AFTER_OBJECT.search(block))


def _no_rows(raw: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in raw], schema=raw)


def _has_infinity(column: pa.Array) -> bool:
    types = pa.types
    if types.is_floating(column.type):
        return bool(pc.any(pc.is_inf(column)).as_py())
    if types.is_struct(column.type):
        return any(_has_infinity(child) for child in column.flatten())
    return types.is_list(column.type) and _has_infinity(column.flatten())


def _by_python(block: bytes, raw: pa.Schema, first_line: int, where: str) -> pa.RecordBatch:
    rows: list[list[Any]] = []
    readers = [(f.name, _reader(f.type, f.name), pa.schema([f])) for f in raw]
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        try:
            for value in _objects(line.decode("utf-8")):
                rows.append([_field(value, name, read) for name, read, _ in readers])
        except UnicodeDecodeError as e:
            raise SchemaMismatch(f"{where}, line {number}: {e}; write the file in UTF-8") from e
        except (ValueError, RecursionError) as e:
            shown = line[:_SHOWN_BYTES].decode(errors="replace").strip()[:_SHOWN_CHARS]
            raise SchemaMismatch(
                f"{where}, line {number}: {shown!r}: {e}; correct the file or the schema"
            ) from e
    columns = zip(*rows, strict=True) if rows else [()] * len(raw)
    arrays = [pa.array(list(values), f.type) for values, f in zip(columns, raw, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=raw)


def value_parser(raw: pa.Schema) -> Callable[[bytes], dict[str, Any]]:
    """Parses one object to its fields, as `pa.array` takes them. Raises ValueError,
    RecursionError."""
    readers = [(f.name, _reader(f.type, f.name)) for f in raw]

    def parse(value: bytes) -> dict[str, Any]:
        objects = list(_objects(value.decode("utf-8")))
        if len(objects) != 1:
            raise _BadValue("more than one object" if objects else "an empty value")
        return {name: _field(objects[0], name, read) for name, read in readers}

    return parse


def _objects(text: str) -> Iterator[_Object]:
    """The objects of a line: usually one, none if it is blank."""
    at = 0
    text = text.strip(_WHITESPACE)
    if _is_deep(text):
        raise _BadValue(f"more than {_MOST_DEPTH} objects and arrays inside each other")
    while at < len(text):
        if text[at] == "[":  # perhaps the whole file: Python objects would take 40 times its size
            raise _BadValue(_not_an_object("an array"))
        try:
            value, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as e:
            hint = "" if e.pos else "; is the source's format another one"
            raise _BadValue(f"not JSON from character {e.pos + 1} on{hint}") from e
        if not isinstance(value, _Object):
            raise _BadValue(_not_an_object(_described(value)))
        yield value
        while at < len(text) and text[at] in _WHITESPACE:
            at += 1


def _is_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= _MOST_DEPTH:
        return False
    depth = 0
    for found in re.finditer(r"[\[{\]}]", _TEXT.sub("", text)):
        depth += 1 if found[0] in "[{" else -1
        if depth > _MOST_DEPTH:
            return True
    return False


def _not_an_object(found: str) -> str:
    return f"{found} instead of an object; write one object a line"


Reader = Callable[[Any], Any]
"""Converts a decoded JSON value, never None, to what `pa.array` accepts for the type. Raises
_BadValue."""


def _field(value: _Object, name: str, read: Reader) -> Any:
    if name in value.twice:
        raise _BadValue(f"field {name} occurs twice")
    inner = value.get(name)
    return None if inner is None else read(inner)


def _reader(data_type: pa.DataType, path: str) -> Reader:
    types = pa.types
    if types.is_struct(data_type):
        inner = [(f.name, _reader(f.type, f"{path}.{f.name}")) for f in data_type]
        return lambda v: (
            {name: _field(v, name, read) for name, read in inner}
            if isinstance(v, _Object)
            else _refuse(v, path, "an object")
        )
    if types.is_list(data_type):
        item = _reader(data_type.value_type, path)
        return lambda v: (
            [None if i is None else item(i) for i in v]
            if isinstance(v, list)
            else _refuse(v, path, "an array")
        )
    if types.is_floating(data_type):
        return lambda v: _double(v, path, data_type)
    if types.is_decimal(data_type):
        return lambda v: _decimal(v, path, data_type)
    if types.is_integer(data_type):
        return lambda v: _integer(v, path, data_type)
    if types.is_boolean(data_type):
        return lambda v: v if isinstance(v, bool) else _refuse(v, path, "true or false")
    return lambda v: _string(v, path)


def _refuse(value: Any, path: str, wanted: str) -> Any:
    raise _BadValue(f"field {path}: {_described(value)} instead of {wanted}")


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _described(value: Any) -> str:
    """What a value is, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case _NonFinite():
            return str(value)
        case int() | _Number():
            return f"the number {_shown(str(value))}"
        case str():
            return f"the string {_shown(repr(value))}"
        case list():
            return "an array"
        case _:
            return "an object"


def _string(value: Any, path: str) -> str:
    if type(value) is not str:
        _refuse(value, path, "a string")
    if not value.isascii():
        value.encode("utf-8")  # half of a surrogate pair is not valid text
    return str(value)


def _double(value: Any, path: str, data_type: pa.DataType) -> float | None:
    if isinstance(value, bool | list | dict) or (type(value) is str and value not in _NON_FINITE):
        return float(_refuse(value, path, "a number"))
    if type(value) is str or isinstance(value, _NonFinite):
        return _NON_FINITE[value]
    if value is _MINUS_ZERO:
        return -0.0
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if pa.types.is_float32(data_type):
        # From the text, as in Arrow's reader: by way of a double it would be rounded twice.
        number = float(pa.scalar(str(value)).cast(data_type).as_py())
    if math.isinf(number):
        raise _BadValue(
            f"field {path}: {_described(value)} is too large for a {arrow_to_ddl(data_type)}"
        )
    return number


def _decimal(value: Any, path: str, data_type: pa.DataType) -> Decimal | None:
    if value == "" and type(value) is str:
        return None
    if isinstance(value, bool | list | dict) or not is_number(str(value).strip()):
        _refuse(value, path, "a number")
    try:
        return decimal_of(str(value).strip(), data_type)
    except ValueError as e:
        raise _BadValue(
            f"field {path}: {_described(value)} is not a {arrow_to_ddl(data_type)}"
        ) from e


def _integer(value: Any, path: str, data_type: pa.DataType) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(value, path, "a whole number")
    try:
        pa.scalar(value, data_type)
    except (OverflowError, ValueError) as e:
        raise _BadValue(
            f"field {path}: {_described(value)} is not a {arrow_to_ddl(data_type)}"
        ) from e
    return int(value)
