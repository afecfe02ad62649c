"""Encodes rows as Protobuf messages of a given type: what `rekindle.connectors.protobuf_values`
reads in a column of the same type.

Each column is a field of its name; other fields of the message are left out. A NULL is a field that
is not there, so it needs a field whose presence is known. Pure.

Design: docs/decisions/0062-formats-of-kafka-values.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import message_factory
from google.protobuf.message import EncodeError

from rekindle.arrow_types import arrow_to_ddl
from rekindle.connectors.json_writer import UnencodableValue, valid_texts
from rekindle.connectors.protobuf_messages import (
    TIMESTAMP_MESSAGE,
    find_message,
    is_map,
    message_place,
    written_file,
)
from rekindle.connectors.schema_registry import WrittenSchema
from rekindle.errors import SchemaMismatch
from rekindle.topology.problems import nearest

_Values = Callable[[pa.Array], list[Any]]
"""The values of a field as the library takes them; None: it is not there. Raises
UnencodableValue."""
_MOST_DIGITS = 20
"""Of the text of a number; the library itself refuses those that are out of range."""
_WHOLE, _DOUBLE, _FLOAT, _BOOL, _STRING = (1, 2, 3, 4), 5, 6, 7, 9  # `cpp_type` of fields


class ProtobufEncoding:
    """Raises SchemaMismatch if a column is not that of a field."""

    def __init__(self, schema: pa.Schema, descriptors: str, message: str) -> None:
        """`descriptors`: a FileDescriptorSet in base64."""
        self._message = find_message(descriptors, message)
        self._class = message_factory.GetMessageClass(self._message)
        self._fields = _fields(self._message, schema, "")

    @property
    def place(self) -> list[int]:
        """As `message_place`."""
        return message_place(self._message)

    @property
    def written_schema(self) -> WrittenSchema:
        """The file of the message."""
        return written_file(self._message.file)

    def encode(self, rows: pa.Table) -> list[bytes]:
        """A message for each row. Raises UnencodableValue."""
        columns = {
            name: values(rows.column(name).combine_chunks())
            for name, values in self._fields.items()
        }
        if not columns:
            return [b""] * rows.num_rows
        names = list(columns)
        return [
            self._encode(dict(zip(names, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        ]

    def _encode(self, row: dict[str, Any]) -> bytes:
        try:
            return bytes(self._class(**row).SerializeToString())
        except (ValueError, TypeError, OverflowError, EncodeError) as error:
            raise UnencodableValue(self._problem(row) or str(error)) from error

    def _problem(self, row: dict[str, Any]) -> str:
        """Of the first column whose value does not fit alone."""
        for name, value in row.items():
            try:
                self._class(**{name: value})
            except (ValueError, TypeError, OverflowError) as error:
                return f"column {name} does not fit field {self._message.full_name}.{name}: {error}"
        return ""


def _fields(message: Any, columns: pa.Schema | pa.StructType, path: str) -> dict[str, _Values]:
    """By name of the column. Raises SchemaMismatch."""
    known = {field.name: field for field in message.fields}
    of_oneofs = dict[str, str]()
    for column in columns:
        name = f"{path}{column.name}"
        field = known.get(column.name)
        if field is None:
            hint = nearest(column.name, list(known))
            raise _mismatch(name, f"{message.full_name} has no field of this name; {hint}")
        group = field.containing_oneof
        other = name if group is None else of_oneofs.setdefault(group.name, name)
        if other != name:
            what = f"it is in one oneof with {other}, and a message has only one of them"
            raise _mismatch(name, f"{what}; write one of the two in each query")
    if missing := [f.name for f in message.fields if f.is_required and f.name not in columns.names]:
        raise _mismatch(
            f"{path}{missing[0]}", f"{message.full_name} requires it; write such a column in sql"
        )
    return {
        column.name: _field(known[column.name], column.type, f"{path}{column.name}")
        for column in columns
    }


def _mismatch(path: str, what: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {path}: {what}")


def _field(field: Any, column: pa.DataType, path: str) -> _Values:
    """Raises SchemaMismatch."""
    if is_map(field):
        raise _mismatch(path, "a map is not written; leave the column out in sql")
    if field.is_repeated:
        if not pa.types.is_list(column):
            raise _mismatch(
                path, f"{arrow_to_ddl(column)} is not written to a repeated field; write array(...)"
            )
        item = _present(_value(field, column.value_type, path), path, "an item")
        return _present(lambda array: _lists(array, item), path, "a repeated field")
    values = _value(field, column, path)
    if field.has_presence and not field.is_required:
        return values
    return _present(values, path, f"field {field.full_name}")


def _present(values: _Values, path: str, what: str) -> _Values:
    """Of what cannot be left out."""

    def of(array: pa.Array) -> list[Any]:
        if array.null_count:
            hint = "declare the field optional, or write COALESCE in sql"
            raise UnencodableValue(f"column {path} is NULL, which {what} is never; {hint}")
        return values(array)

    return of


def _value(field: Any, column: pa.DataType, path: str) -> _Values:
    """Of a field, or of an item. Raises SchemaMismatch."""
    types = pa.types
    message = field.message_type
    if message is not None and message.full_name == TIMESTAMP_MESSAGE:
        if types.is_timestamp(column):
            return _times
    elif message is not None:
        if types.is_struct(column):
            inner = pa.schema([column.field(at) for at in range(column.num_fields)])
            fields = _fields(message, inner, f"{path}.")
            return lambda array: _structs(array, fields)
    elif field.enum_type is not None:
        if types.is_string(column):
            numbers = {value.name: value.number for value in field.enum_type.values}
            return lambda array: _enum(array, numbers, path)
    elif field.type == field.TYPE_BYTES:
        if types.is_binary(column):
            return _plain
    elif field.cpp_type == _STRING and types.is_string(column):
        return lambda array: _plain(valid_texts(array))
    elif field.cpp_type in _WHOLE and (types.is_integer(column) or _is_whole(column)):
        return lambda array: [None if v is None else int(v) for v in array.to_pylist()]
    elif (
        (field.cpp_type == _DOUBLE and types.is_floating(column))
        or (field.cpp_type == _FLOAT and types.is_float32(column))
        or (field.cpp_type == _BOOL and types.is_boolean(column))
    ):
        return _plain
    kind = message.full_name if message is not None else _kind(field)
    raise _mismatch(
        path,
        f"{arrow_to_ddl(column)} is not written to field {field.full_name}, which is {kind}; "
        "write another type with CAST in sql",
    )


def _kind(field: Any) -> str:
    names = {number: name for name, number in vars(type(field)).items() if name[:5] == "TYPE_"}
    return str(names.get(field.type, "TYPE_?"))[5:].lower()


def _is_whole(column: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(column) and column.scale == 0)


def _plain(array: pa.Array) -> list[Any]:
    found: list[Any] = array.to_pylist()
    return found


def _times(array: pa.Array) -> list[Any]:
    found = list[Any]()
    for us in array.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist():
        if us is None:
            found.append(None)
        else:
            seconds, rest = divmod(us, 1_000_000)
            found.append({"seconds": seconds, "nanos": rest * 1000})
    return found


def _enum(array: pa.Array, numbers: dict[str, int], path: str) -> list[Any]:
    def number(text: str) -> int:
        if (found := numbers.get(text)) is not None:
            return found
        if text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS:
            return int(text)  # of a newer version of the enum: as it is read
        raise UnencodableValue(f"column {path}: {text!r} is not among {', '.join(numbers)}")

    return [None if text is None else number(text) for text in valid_texts(array).to_pylist()]


def _structs(array: pa.Array, fields: dict[str, _Values]) -> list[Any]:
    present = array.drop_null() if array.null_count else array
    names = list(fields)
    columns = [values(pc.struct_field(present, name)) for name, values in fields.items()]
    if columns:
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    else:
        rows = [{} for _ in range(len(present))]
    if len(present) == len(array):
        return list(rows)
    found = iter(rows)
    return [next(found) if there else None for there in array.is_valid().to_pylist()]


def _lists(array: pa.ListArray, item: _Values) -> list[Any]:
    items = item(array.flatten())
    found, first = list[Sequence[Any]](), 0
    for length in pc.list_value_length(array).to_pylist():
        found.append(items[first : first + length])
        first += length
    return list(found)
