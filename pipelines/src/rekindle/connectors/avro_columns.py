"""Decodes many Avro records at once, column by column.

Records are read side by side: each has a cursor, and one step reads the next field of all records
with vector operations. So the bounds of each record are kept, and of each that is malformed it is
known why, which a decoder that is given all of them as one file cannot say. Only the columns that
are asked for are built; other fields are passed over.

Pure. Design: docs/decisions/0062-formats-of-kafka-values.md. Paper: Avro 1.12, "Binary Encoding".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.arrow_types import arrow_to_ddl
from rekindle.topology.avro import (
    ArrayOf,
    AvroField,
    AvroSchema,
    AvroType,
    Enumeration,
    Fixed,
    MapOf,
    Primitive,
    RecordName,
    UnionOf,
)

Rows = npt.NDArray[np.int64]
Longs = npt.NDArray[np.int64]
_PADDING = 16
_MOST_DIGITS = 38
_MOST_DEPTH = 64
"""Of records that may contain themselves."""
_TIMES: Mapping[str, pa.DataType] = {
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("ns", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
    "local-timestamp-nanos": pa.timestamp("ns"),
}


class UnreadableSchema(ValueError):
    """A declared column is of a type that no column can be read from; names the field."""


class Cursors:
    """Where each of many records is read. `bad`: what is wrong with a record, by its number; it is
    read on, without meaning."""

    def __init__(self, values: Sequence[bytes], skipped: int = 0) -> None:
        """`skipped`: bytes at the beginning of each value that are not of the record."""
        self._bytes = b"".join([*values, bytes(_PADDING)])
        self._data = np.frombuffer(self._bytes, np.uint8)
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self._ends = np.cumsum(lengths)
        self._at = self._ends - lengths + skipped
        self._buffer = pa.py_buffer(self._bytes)
        self.bad: dict[int, str] = {}
        self.depth = 0

    def finish(self) -> None:
        """All fields are read: each record has to end here."""
        for row in np.flatnonzero(self._at != self._ends).tolist():
            left = int(self._ends[row] - self._at[row])
            what = f"{left} bytes follow the record" if left > 0 else "the record is truncated"
            self.bad.setdefault(row, what)

    def refuse(self, rows: Rows, what: str) -> None:
        for row in rows.tolist():
            self.bad.setdefault(row, what)

    def within(self, rows: Rows, sizes: Longs, path: str) -> npt.NDArray[np.bool_]:
        """Which have so many bytes left; the others are refused."""
        left = self._ends[rows] - self._at[rows]
        holds = (sizes >= 0) & (sizes <= left)
        if not holds.all():
            self.refuse(rows[(sizes >= 0) & ~holds], f"field {path}: the record is truncated")
            self.refuse(rows[sizes < 0], f"field {path}: a negative length")
        return holds

    def longs(self, rows: Rows, path: str) -> Longs:
        at = self._at[rows]
        byte = self._data.take(at, mode="clip")
        value = (byte & 0x7F).astype(np.uint64)
        at += 1
        more = np.flatnonzero(byte > 0x7F)
        shift = 7
        while len(more) and shift < 70:
            byte = self._data.take(at[more], mode="clip")
            value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            at[more] += 1
            more = more[byte > 0x7F]
            shift += 7
        if len(more):
            self.refuse(rows[more], f"field {path}: a number of more than 10 bytes")
        self._at[rows] = at
        sign = -(value & np.uint64(1)).view(np.int64)
        return (value >> np.uint64(1)).view(np.int64) ^ sign

    def skip(self, rows: Rows, sizes: Longs, path: str) -> None:
        self._at[rows] += np.where(self.within(rows, sizes, path), sizes, 0)

    def binaries(self, rows: Rows, path: str) -> pa.Array:
        """Length and bytes."""
        return self.of_sizes(rows, self.longs(rows, path), path)

    def of_sizes(self, rows: Rows, sizes: Longs, path: str) -> pa.Array:
        """So many bytes of each. Rows ascend, so each is an element of one array over all bytes,
        and what is between them is one as well. Nothing is copied of a record that is truncated."""
        sizes = np.where(self.within(rows, sizes, path), sizes, 0)
        starts, ends = self._at[rows], self._ends[rows]
        self._at[rows] = starts + sizes
        offsets = np.empty(2 * len(rows), np.int32)
        # A malformed record's cursor may be in the next record.
        offsets[0::2], offsets[1::2] = np.minimum(starts, ends), np.minimum(starts + sizes, ends)
        both = pa.Array.from_buffers(
            pa.binary(), max(0, len(offsets) - 1), [None, pa.py_buffer(offsets), self._buffer]
        )
        return both.take(pa.array(np.arange(0, len(offsets), 2)))

    def few(self, rows: Rows, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes of each, at most 8, as rows of a matrix."""
        at = self._at[rows]
        self._at[rows] = at + size
        return self._data.take(at[:, None] + np.arange(size), mode="clip")

    def ended(self, rows: Rows) -> npt.NDArray[np.bool_]:
        return self._at[rows] > self._ends[rows]


Read = Callable[[Cursors, Rows], pa.Array]
Pass = Callable[[Cursors, Rows], object]
"""Passes over a field."""


@dataclass(frozen=True, slots=True)
class AvroColumn:
    """Reads a field of some records, which ascend, as an array of `type`."""

    read: Read
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class AvroColumns:
    """Reads the columns that are declared, from records of one schema."""

    names: tuple[str, ...]
    fields: tuple[tuple[str, Read | Pass], ...]

    def decode(
        self, values: Sequence[bytes], skipped: int = 0
    ) -> tuple[pa.RecordBatch, Rows, dict[int, str]]:
        """(rows of the records that are not bad, their numbers, what is wrong with the bad
        ones)."""
        cursors, rows = Cursors(values, skipped), np.arange(len(values))
        found = {name: read(cursors, rows) for name, read in self.fields}
        cursors.finish()
        batch = pa.RecordBatch.from_arrays(
            [found[name] for name in self.names], names=[*self.names]
        )
        if not cursors.bad:
            return batch, rows, {}
        good = np.delete(rows, list(cursors.bad))
        return batch.take(pa.array(good)), good, cursors.bad


class ColumnBuilder:
    """Of one schema."""

    def __init__(self, schema: AvroSchema) -> None:
        self._schema = schema
        self._passing: dict[str, Pass] = {}

    def columns(self, declared: pa.Schema, names: Mapping[str, Sequence[str]]) -> AvroColumns:
        """`names`: by column, the names that its field may have. A column without a field is not
        among the columns. Raises UnreadableSchema."""
        fields, found = list[tuple[str, Read | Pass]](), list[str]()
        for field in self._schema.fields:
            target = next((c for c in declared if field.name in names[c.name]), None)
            if target is None or target.name in found:
                fields.append(("", self._pass(field.type, field.name)))
            else:
                fields.append((target.name, self._read(field.type, target.type, field.name).read))
                found.append(target.name)
        return AvroColumns(tuple(found), tuple(fields))

    def _read(self, given: AvroType, target: pa.DataType, path: str) -> AvroColumn:
        match given:
            case Primitive():
                return _primitive(given, path)
            case Fixed():
                return _fixed(given, path)
            case Enumeration(symbols):
                return _enumeration(symbols, path)
            case UnionOf(branches):
                return self._union(branches, target, path)
            case RecordName(name) if pa.types.is_struct(target):
                return self._struct(self._schema.records[name], target, path)
            case ArrayOf(items) if pa.types.is_list(target):
                return self._array(items, target, path)
            case _:
                kind = type(given).__name__.removesuffix("Of").removesuffix("Name").lower()
                wanted = arrow_to_ddl(target)
                raise UnreadableSchema(f"field {path}: a {kind} is not read as {wanted}")

    def _union(self, branches: Sequence[AvroType], target: pa.DataType, path: str) -> AvroColumn:
        values = [b for b in branches if b != Primitive("null")]
        if len(values) != 1:
            raise UnreadableSchema(f"field {path}: a union of {len(values)} types besides null")
        column = self._read(values[0], target, path)
        passing = [None if b is values[0] else self._pass(b, path) for b in branches]

        def read(cursors: Cursors, rows: Rows) -> pa.Array:
            branch = _index(cursors, rows, len(branches), path)
            places, found = np.full(len(rows), -1), pa.nulls(0, column.type)
            for number, skip in enumerate(passing):
                chosen = np.flatnonzero(branch == number)
                if skip is not None:
                    skip(cursors, rows[chosen])
                    continue
                found = column.read(cursors, rows[chosen])
                places[chosen] = np.arange(len(chosen))
            return found if len(found) == len(rows) else found.take(_places(places))

        return AvroColumn(read, column.type)

    def _struct(self, fields: Sequence[AvroField], target: pa.StructType, path: str) -> AvroColumn:
        """Fields that the record lacks are NULL."""
        names = [f.name for f in target]
        types = {f.name: f.type for f in target}
        columns = {
            f.name: self._read(f.type, types[f.name], f"{path}.{f.name}")
            for f in fields
            if f.name in names
        }
        passing = {
            f.name: self._pass(f.type, f"{path}.{f.name}") for f in fields if f.name not in names
        }
        order = [f.name for f in fields]
        of = [pa.field(n, columns[n].type if n in columns else pa.null()) for n in names]

        def read(cursors: Cursors, rows: Rows) -> pa.Array:
            found = {n: pa.nulls(len(rows)) for n in names if n not in columns}
            for name in order:
                if name in columns:
                    found[name] = columns[name].read(cursors, rows)
                else:
                    passing[name](cursors, rows)
            return pa.StructArray.from_arrays([found[n] for n in names], fields=of)

        return AvroColumn(read, pa.struct(of))

    def _array(self, items: AvroType, target: pa.ListType, path: str) -> AvroColumn:
        column = self._read(items, target.value_type, f"{path}[]")
        type_ = pa.list_(column.type)

        def read(cursors: Cursors, rows: Rows) -> pa.Array:
            parts, owners = [pa.nulls(0, column.type)], [np.empty(0, np.int64)]

            def item(cursors: Cursors, at: Rows) -> None:
                parts.append(column.read(cursors, rows[at]))
                owners.append(at)

            _each_item(cursors, rows, item, path)
            owner = np.concatenate(owners)
            order = np.argsort(owner, kind="stable")  # an owner's items stay in their order
            counts = np.bincount(owner, minlength=len(rows))
            offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
            found = pa.concat_arrays(parts).take(pa.array(order))
            return pa.ListArray.from_arrays(pa.array(offsets), found, type=type_)

        return AvroColumn(read, type_)

    def _pass(self, given: AvroType, path: str) -> Pass:
        match given:
            case Primitive("string" | "bytes"):
                return lambda cursors, rows: cursors.skip(rows, cursors.longs(rows, path), path)
            case Fixed(size):
                return lambda cursors, rows: cursors.skip(rows, np.full(len(rows), size), path)
            case Primitive():
                return _primitive(given, path).read
            case Enumeration(symbols):
                return _enumeration(symbols, path).read
            case UnionOf(branches):
                passing = [self._pass(b, path) for b in branches]
                return lambda cursors, rows: _pass_union(cursors, rows, passing, path)
            case ArrayOf(items):
                inner = self._pass(items, f"{path}[]")
                return lambda cursors, rows: _each_item(
                    cursors, rows, lambda c, at: inner(c, rows[at]), path
                )
            case MapOf(values):
                key, value = self._pass(Primitive("string"), path), self._pass(values, path)
                return lambda cursors, rows: _each_item(
                    cursors, rows, lambda c, at: (key(c, rows[at]), value(c, rows[at])), path
                )
            case RecordName(name):
                return self._pass_record(name, path)

    def _pass_record(self, name: str, path: str) -> Pass:
        if name not in self._passing:
            fields = list[Pass]()
            self._passing[name] = lambda cursors, rows: _pass_fields(cursors, rows, fields, path)
            fields += [self._pass(f.type, f"{path}.{f.name}") for f in self._schema.records[name]]
        return self._passing[name]


def _pass_fields(cursors: Cursors, rows: Rows, fields: Sequence[Pass], path: str) -> None:
    if cursors.depth == _MOST_DEPTH:
        cursors.refuse(rows, f"field {path}: more than {_MOST_DEPTH} records inside each other")
        return
    cursors.depth += 1
    for skip in fields:
        skip(cursors, rows)
    cursors.depth -= 1


def _each_item(
    cursors: Cursors, rows: Rows, item: Callable[[Cursors, Rows], object], path: str
) -> None:
    """Calls `item` with the positions in `rows` of those that have a first item, then a second
    one, and so on."""
    left = np.zeros(len(rows), np.int64)
    open_ = np.arange(len(rows))  # whose last block has not been seen
    while True:
        while len(begins := open_[left[open_] == 0]):
            counts = cursors.longs(rows[begins], path)
            sized = begins[counts < 0]
            if len(sized):
                cursors.longs(rows[sized], path)  # the size of the block
            # Each item has at least one byte.
            counts = np.abs(counts)
            holds = cursors.within(rows[begins], counts, path)
            left[begins] = np.where(holds, counts, 0)
            open_ = np.setdiff1d(open_, begins[left[begins] == 0], assume_unique=True)
        if not len(open_):
            return
        item(cursors, open_)
        left[open_] -= 1
        if (ended := cursors.ended(rows[open_])).any():
            cursors.refuse(rows[open_[ended]], f"field {path}: the record is truncated")
            open_ = open_[~ended]


def _index(cursors: Cursors, rows: Rows, size: int, path: str) -> Longs:
    """Of a symbol or a branch; -1 for one that does not exist."""
    found = cursors.longs(rows, path)
    exists = (found >= 0) & (found < size)
    if not exists.all():
        cursors.refuse(rows[~exists], f"field {path}: {size} symbols or branches, and not this one")
    return np.where(exists, found, -1)


def _pass_union(cursors: Cursors, rows: Rows, passing: Sequence[Pass], path: str) -> None:
    branch = _index(cursors, rows, len(passing), path)
    for number, skip in enumerate(passing):
        if len(chosen := rows[branch == number]):
            skip(cursors, chosen)


def _places(places: Longs) -> pa.Array:
    """NULL for -1."""
    return pa.array(places, mask=places < 0)


def _enumeration(symbols: Sequence[str], path: str) -> AvroColumn:
    texts = pa.array(symbols, pa.string())
    return AvroColumn(
        lambda cursors, rows: texts.take(_places(_index(cursors, rows, len(symbols), path))),
        pa.string(),
    )


def _fixed(given: Fixed, path: str) -> AvroColumn:
    def read(cursors: Cursors, rows: Rows) -> pa.Array:
        return cursors.of_sizes(rows, np.full(len(rows), given.size), path)

    if given.logical == "decimal":
        return _decimal(read, given.precision, given.scale, path)
    return AvroColumn(read, pa.binary())


def _primitive(given: Primitive, path: str) -> AvroColumn:
    match given.kind:
        case "null":
            return AvroColumn(lambda cursors, rows: pa.nulls(len(rows)), pa.null())
        case "boolean":
            return AvroColumn(lambda cursors, rows: _booleans(cursors, rows, path), pa.bool_())
        case "int" if given.logical == "date":
            return AvroColumn(
                lambda cursors, rows: pa.array(_ints(cursors, rows, path).astype(np.int32)).view(
                    pa.date32()
                ),
                pa.date32(),
            )
        case "int":
            return AvroColumn(
                lambda cursors, rows: pa.array(_ints(cursors, rows, path)), pa.int64()
            )
        case "long":
            type_ = _TIMES.get(given.logical, pa.int64())
            return AvroColumn(
                lambda cursors, rows: pa.array(cursors.longs(rows, path)).view(type_), type_
            )
        case "float" | "double":
            size = 4 if given.kind == "float" else 8
            return AvroColumn(
                lambda cursors, rows: pa.array(
                    np.ascontiguousarray(cursors.few(rows, size)).view(f"<f{size}").reshape(-1)
                ),
                pa.float32() if size == 4 else pa.float64(),
            )
        case "bytes" if given.logical == "decimal":
            return _decimal(
                lambda cursors, rows: cursors.binaries(rows, path),
                given.precision,
                given.scale,
                path,
            )
        case "bytes":
            return AvroColumn(lambda cursors, rows: cursors.binaries(rows, path), pa.binary())
        case _:
            return AvroColumn(lambda cursors, rows: _texts(cursors, rows, path), pa.string())


def _booleans(cursors: Cursors, rows: Rows, path: str) -> pa.Array:
    found = cursors.few(rows, 1)[:, 0]
    if (wrong := found > 1).any():
        cursors.refuse(rows[wrong], f"field {path}: not a boolean")
    return pa.array(found == 1)


def _ints(cursors: Cursors, rows: Rows, path: str) -> Longs:
    found = cursors.longs(rows, path)
    if (wrong := found != found.astype(np.int32)).any():
        cursors.refuse(rows[wrong], f"field {path}: not an int of 32 bits")
    return found


def _texts(cursors: Cursors, rows: Rows, path: str) -> pa.Array:
    found = cursors.binaries(rows, path)
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        texts = list[str | None]()
        for row, value in zip(rows.tolist(), found.to_pylist(), strict=True):
            try:
                texts.append(value.decode("utf-8"))
            except UnicodeDecodeError as error:
                cursors.bad.setdefault(row, f"field {path}: {error}")
                texts.append(None)
        return pa.array(texts, pa.string())


def _decimal(read: Read, precision: int, scale: int, path: str) -> AvroColumn:
    """Two's complement, the most significant byte first."""
    if not 1 <= precision <= _MOST_DIGITS:
        raise UnreadableSchema(f"field {path}: a decimal of {precision} digits")
    type_, limit = pa.decimal128(precision, scale), 10**precision

    def of(cursors: Cursors, rows: Rows) -> pa.Array:
        numbers = list[Decimal | None]()
        for row, value in zip(rows.tolist(), read(cursors, rows).to_pylist(), strict=True):
            number = int.from_bytes(value, "big", signed=True)
            if abs(number) >= limit:
                cursors.bad.setdefault(row, f"field {path}: more than {precision} digits")
                numbers.append(None)
            else:
                digits = tuple(map(int, str(abs(number))))
                numbers.append(Decimal((int(number < 0), digits, -scale)))
        return pa.array(numbers, type_)

    return AvroColumn(of, type_)
