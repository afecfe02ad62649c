"""Parses Protobuf values: each is one message of the type that a set of descriptors describes.

Fields are found by their numbers, so values that were written with older and newer versions of the
message are read. A value of a schema registry begins with a zero byte, the four bytes of the number
of its schema, and the place of its type among the messages of the file.

Design: docs/decisions/0062-formats-of-kafka-values.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from rekindle.arrow_types import arrow_to_ddl
from rekindle.connectors.conversions import TextRules
from rekindle.connectors.protobuf_messages import (
    TIMESTAMP_MESSAGE,
    find_message,
    is_map,
    message_place,
)
from rekindle.connectors.record_values import Parsed, Part, Values, chunks, present_values
from rekindle.errors import SchemaMismatch

_BLOCK_BYTES = 1 << 20
"""Bytes of values that are messages at the same time: they may take 160 times as much."""
_PREFIX_BYTES = 5
_NO_PREFIX = "it does not begin as values of a schema registry do"
_MOST_US = 1 << 63
Read = Callable[[Sequence[Any]], pa.Array]
"""The array of a field of some messages. Raises ValueError if a value is none of its type."""
_Build = Callable[[Sequence[Any]], pa.Array]


class ProtobufValues:
    """Implements `rekindle.connectors.record_values.ValueFormat`."""

    rules = TextRules()

    def __init__(
        self, declared: pa.Schema, descriptors: str, message: str, *, has_prefix: bool
    ) -> None:
        """`descriptors`: a FileDescriptorSet in base64. Raises SchemaMismatch."""
        found = find_message(descriptors, message)
        self._message = message_factory.GetMessageClass(found)
        self._names = declared.names
        self._place = message_place(found) if has_prefix else None
        fields = {f.name: f for f in found.fields}
        self._columns = [
            _field(fields[f.name], f.type, f.name) if f.name in fields else _nulls for f in declared
        ]

    def parse(self, values: Values) -> Parsed:
        present, numbers = present_values(values)
        parts, bad = list[Part](), dict[int, str]()
        for chunk in chunks(present, _BLOCK_BYTES):
            parts += self._parse(present[chunk], numbers[chunk].tolist(), bad)
        return Parsed(parts, bad)

    def _parse(
        self, values: Sequence[bytes], numbers: Sequence[int], bad: dict[int, str]
    ) -> list[Part]:
        messages, good = list[Any](), list[int]()
        for number, value in zip(numbers, values, strict=True):
            try:
                messages.append(self._message.FromString(self._without_prefix(value)))
                good.append(number)
            except (DecodeError, ValueError) as error:
                bad[number] = str(error)
        return list(self._rows(messages, good, bad))

    def _without_prefix(self, value: bytes) -> bytes:
        """Raises ValueError."""
        if self._place is None:
            return value
        if len(value) <= _PREFIX_BYTES or value[0]:
            raise ValueError(_NO_PREFIX)
        if value[_PREFIX_BYTES] == 0:  # the first message, for short
            place, at = [0], _PREFIX_BYTES + 1
        else:
            count, at = _long(value, _PREFIX_BYTES)
            place = []
            while len(place) < count:
                index, at = _long(value, at)
                place.append(index)
        if place != self._place:
            raise ValueError(f"it is the message at {place} of its file, not at {self._place}")
        return value[at:]

    def _rows(
        self, messages: Sequence[Any], numbers: Sequence[int], bad: dict[int, str]
    ) -> Iterator[Part]:
        """Halves what cannot be read, until the messages are found that cannot."""
        if not messages:
            return
        try:
            columns = [read(messages) for read in self._columns]
        except (ValueError, OverflowError) as error:
            if len(messages) == 1:
                bad[numbers[0]] = str(error)
                return
            half = len(messages) // 2
            yield from self._rows(messages[:half], numbers[:half], bad)
            yield from self._rows(messages[half:], numbers[half:], bad)
        else:
            rows = pa.RecordBatch.from_arrays(columns, names=self._names)
            yield Part(rows, np.array(numbers, np.int64))


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A variable-length number, and where it ends. Raises ValueError."""
    value, shift = 0, 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise ValueError(_NO_PREFIX)


def _nulls(messages: Sequence[Any]) -> pa.Array:
    return pa.nulls(len(messages))


def _field(field: Any, target: pa.DataType, path: str) -> Read:
    """Raises SchemaMismatch."""
    name = field.name
    get = attrgetter(name)
    if field.is_repeated:
        if is_map(field):
            raise SchemaMismatch(f"field {path}: a map is not read as a column")
        if not pa.types.is_list(target):
            wanted = arrow_to_ddl(target)
            raise SchemaMismatch(f"field {path}: a repeated field is not read as {wanted}")
        build = _values(field, target.value_type, path)
        return lambda messages: _lists([get(m) for m in messages], build)
    build = _values(field, target, path)
    if not field.has_presence:
        return lambda messages: build(list(map(get, messages)))
    return lambda messages: _optional(
        [get(m) if m.HasField(name) else None for m in messages], build
    )


def _values(field: Any, target: pa.DataType, path: str) -> _Build:
    """Of values that are not None. Raises SchemaMismatch."""
    if field.message_type is not None:
        return _messages(field.message_type, target, path)
    if field.enum_type is not None:
        names = {value.number: value.name for value in field.enum_type.values}
        # A number that this version of the enum lacks has no name.
        return lambda values: pa.array([names.get(v, str(v)) for v in values], pa.string())
    type_ = _SCALARS[field.cpp_type] if field.type != field.TYPE_BYTES else pa.binary()
    return lambda values: pa.array(values, type_)


def _messages(message: Any, target: pa.DataType, path: str) -> _Build:
    if message.full_name == TIMESTAMP_MESSAGE and not pa.types.is_struct(target):
        return lambda values: pa.array([_time_us(v) for v in values], pa.timestamp("us", "UTC"))
    if not pa.types.is_struct(target):
        raise SchemaMismatch(f"field {path}: a message is not read as {arrow_to_ddl(target)}")
    fields = {f.name: f for f in message.fields}
    columns = [
        _field(fields[f.name], f.type, f"{path}.{f.name}") if f.name in fields else _nulls
        for f in target
    ]
    names = [f.name for f in target]
    return lambda values: pa.StructArray.from_arrays([read(values) for read in columns], names)


def _optional(values: Sequence[Any], build: _Build) -> pa.Array:
    present = [v for v in values if v is not None]
    if len(present) == len(values):
        return build(present)
    numbers = iter(range(len(present)))
    places = [None if v is None else next(numbers) for v in values]
    return build(present).take(pa.array(places, pa.int64()))


def _lists(values: Sequence[Sequence[Any]], build: _Build) -> pa.Array:
    items = build([item for each in values for item in each])
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), items)


def _time_us(time: Any) -> int:
    """Raises ValueError."""
    seconds, nanos = int(time.seconds), int(time.nanos)
    if nanos % 1000 or not 0 <= nanos < 1_000_000_000:
        raise ValueError(f"a Timestamp of {nanos} nanoseconds is none of microseconds")
    us = seconds * 1_000_000 + nanos // 1000
    if not -_MOST_US <= us < _MOST_US:
        raise ValueError(f"a Timestamp of {seconds} seconds is no TIMESTAMP")
    return us


_SCALARS = {  # by `cpp_type`
    1: pa.int64(),
    2: pa.int64(),
    3: pa.uint64(),
    4: pa.uint64(),
    5: pa.float64(),
    6: pa.float32(),
    7: pa.bool_(),
    9: pa.string(),
}
