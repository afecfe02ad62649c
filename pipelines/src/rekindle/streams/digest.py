"""The canonical digest of a table: equal rows give equal digests in any Arrow layout.

Replicas, replays and restarted tasks compare epochs by it (invariant I1). It covers column names,
canonical types and values in row order, not IPC bytes: chunking, offsets, dictionary and large
encodings, bytes under a NULL, the payload of a NaN and the sign of zero do not matter. It does
not know epochs, streams or state.

Design: docs/design/streams.md#digest.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DIGEST_BYTES = 16


def chained_digest_from(epoch: int) -> str:
    """The chained digest before any output, after the epoch that is its base."""
    return f"{epoch}:"


def chain_digest(before: str, epoch: int, watermark: int, digest: str, idle: bool = False) -> str:
    """The digest of all epochs since the base; `before`: that of all but the newest one. Equal
    chained digests mean equal epochs, so comparing one epoch compares all before it."""
    base, _, _ = before.partition(":")
    text = f"{before}/{epoch}/{watermark}/{digest}" + ("/idle" if idle else "")
    return f"{base}:{hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()}"


def same_base(one: str, two: str) -> bool:
    """Whether two chained digests of one epoch cover the same epochs."""
    return one.partition(":")[0] == two.partition(":")[0]


_NATIVE = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}


def digest_table(table: pa.Table) -> str:
    """blake2b-128 over the table's canonical values, hex. Raises TypeError for union columns."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hasher.update(f"{table.num_rows}/{table.num_columns}".encode())
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = canonical_type(field.type)
        header = f"{field.name}\0{kind}".encode()
        hasher.update(len(header).to_bytes(4, "little") + header)
        _feed(hasher, _contiguous(column))
    return hasher.hexdigest()


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """The type without the encoding: dictionary, run-end, view and large types, nested too."""
    if kind in _NATIVE:
        return _NATIVE[kind]
    if isinstance(kind, pa.BaseExtensionType):
        return canonical_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return canonical_type(kind.value_type)
    if pa.types.is_map(kind):
        fields = [("key", canonical_type(kind.key_type)), ("value", canonical_type(kind.item_type))]
        return pa.list_(pa.field("item", pa.struct(fields)))
    if _is_list(kind):
        return pa.list_(pa.field("item", canonical_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, canonical_type(f.type)) for f in kind])
    return kind


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    plain = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    return bool(plain or t.is_list_view(kind) or t.is_large_list_view(kind))


def _contiguous(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _feed(hasher: Any, array: pa.Array) -> None:
    """Add one array: length, validity, then values; a NULL counts as zero, or as a value of length
    0."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _feed(hasher, array.storage)
    if pa.types.is_dictionary(kind):
        return _feed(hasher, array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _feed(hasher, pc.run_end_decode(array))
    if pa.types.is_union(kind):
        raise TypeError(f"a column of type {kind} has no canonical digest; use a struct instead")

    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    hasher.update(len(array).to_bytes(8, "little") + (b"\1" if valid is not None else b"\0"))
    if valid is not None:
        hasher.update(np.packbits(valid).tobytes())

    if pa.types.is_null(kind):
        return None
    if pa.types.is_struct(kind):
        for child in array.flatten():
            _feed(hasher, child)
        return None
    if pa.types.is_map(kind) or _is_list(kind):
        return _feed_list(hasher, array)
    if canonical_type(kind) in (pa.string(), pa.binary()):
        return _feed_bytes(hasher, array)
    hasher.update(_fixed_width(array, valid))
    return None


def _feed_list(hasher: Any, array: pa.Array) -> None:
    if pa.types.is_map(array.type):
        key = pa.field("key", array.type.key_type, nullable=False)
        array = array.cast(pa.list_(pa.struct([key, ("value", array.type.item_type)])))
    elif pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    hasher.update(np.ascontiguousarray(lengths.to_numpy(zero_copy_only=False)))
    _feed(hasher, array.flatten())


def _feed_bytes(hasher: Any, array: pa.Array) -> None:
    binary = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else array.type)
    if pa.types.is_binary_view(array.type):
        binary = array.cast(pa.large_binary())
    lengths = pc.fill_null(pc.binary_length(binary), 0).cast(pa.int64())
    hasher.update(np.ascontiguousarray(lengths.to_numpy(zero_copy_only=False)))
    valid = binary.drop_null() if binary.null_count else binary
    if not len(valid):
        return
    is_large = pa.types.is_large_string(valid.type) or pa.types.is_large_binary(valid.type)
    _, raw_offsets, data = valid.buffers()
    offsets = np.frombuffer(raw_offsets, dtype=np.int64 if is_large else np.int32)
    first, last = offsets[valid.offset], offsets[valid.offset + len(valid)]
    if last > first:
        hasher.update(memoryview(data)[first:last])


def _fixed_width(array: pa.Array, valid: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """The values as contiguous numpy, with NULLs zeroed and floats canonical."""
    kind = array.type
    if pa.types.is_boolean(kind):
        values = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
        return np.packbits(values)
    width = kind.bit_width // 8
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(0, dtype=np.uint8)
    start = array.offset * width
    raw = np.frombuffer(data, dtype=np.uint8, count=len(array) * width, offset=start)
    if pa.types.is_floating(kind):
        floats = raw.view(f"f{width}") + 0.0  # a copy in which −0.0 has become 0.0
        floats[np.isnan(floats)] = np.nan
        raw = floats.view(np.uint8)
    if valid is not None:
        raw = raw.reshape(len(array), width).copy()
        raw[~valid] = 0
    return np.ascontiguousarray(raw)
