"""The hash of rows by key, which gives their partition and state bucket.

It must never change: names of state objects in the checkpoint store and hash exchanges depend on
it, so the tests contain golden values. Equal values have equal hashes in all Arrow encodings:
integers of all widths, dates and timestamps of all units, decimals of all scales, strings in any
encoding; NaN is one value, −0.0 is 0.0, NULL is one value of every type.

Design: docs/design/streams.md#exchange.
Paper: Flux (Shah et al. 2004), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_PERSON = b"rekindle"
_NULL = np.uint64(0x6E756C6C6E756C6C)
_BOOLEAN, _INTEGER, _FLOAT, _DATE, _TIMESTAMP, _DECIMAL, _BYTES = (
    np.uint64(n * 0x0123456789ABCDEF & 0xFFFFFFFFFFFFFFFF) for n in range(1, 8)
)


def hash_rows(table: pa.Table, columns: Sequence[str]) -> _Hashes:
    """One uint64 for each row over `columns`, in that order. Without columns: the same for every
    row.

    Raises TypeError for nested columns, which cannot be keys.
    """
    hashes = np.full(table.num_rows, _GOLDEN_RATIO, dtype=np.uint64)
    for name in columns:
        with np.errstate(over="ignore"):
            hashes = mix(hashes * np.uint64(31) + _hash_column(table.column(name), name))
    return hashes


def mix(bits: _Hashes) -> _Hashes:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        bits = bits + _GOLDEN_RATIO
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _hash_column(column: pa.ChunkedArray, name: str) -> _Hashes:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # pyarrow returns no array for a column without chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    hashes = _hash_array(array, name)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashes


def _hash_array(array: pa.Array, name: str) -> _Hashes:
    """Hashes of the values; values at NULLs are arbitrary."""
    kind = array.type
    t = pa.types
    if t.is_null(kind):
        return np.full(len(array), _NULL, dtype=np.uint64)
    if t.is_boolean(kind):
        return mix(_plain(array.cast(pa.uint8()), np.uint8).astype(np.uint64) ^ _BOOLEAN)
    if t.is_unsigned_integer(kind):
        return mix(_plain(array.cast(pa.uint64()), np.uint64) ^ _INTEGER)
    if t.is_integer(kind):
        return mix(_plain(array.cast(pa.int64()), np.int64).view(np.uint64) ^ _INTEGER)
    if t.is_floating(kind):
        values = _plain(array.cast(pa.float64()), np.float64) + 0.0
        values[np.isnan(values)] = np.nan
        return mix(values.view(np.uint64) ^ _FLOAT)
    if t.is_date(kind):
        days = array.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
        return mix(_plain(days, np.int64).view(np.uint64) ^ _DATE)
    if t.is_timestamp(kind):
        micros = array.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
        return mix(_plain(micros, np.int64).view(np.uint64) ^ _TIMESTAMP)
    if t.is_decimal(kind):
        return _hash_unique(array, _DECIMAL, _decimal_bytes)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return _hash_unique(array.cast(pa.large_string()).cast(pa.large_binary()), _BYTES, bytes)
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind):
        return _hash_unique(array.cast(pa.large_binary()), _BYTES, bytes)
    raise TypeError(f"column {name} has type {kind}, which cannot be a key")


def _plain(array: pa.Array, dtype: Any) -> np.ndarray[Any, Any]:
    """The values as numpy, with NULLs as zero."""
    filled = pc.fill_null(array, pa.scalar(0, array.type)) if array.null_count else array
    values: np.ndarray[Any, Any] = filled.to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)


def _hash_unique(array: pa.Array, tag: np.uint64, canonical: Callable[[Any], bytes]) -> _Hashes:
    """Hash each distinct value once, because keys repeat."""
    encoded = array.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    if not values:
        return np.full(len(array), _NULL, dtype=np.uint64)
    # A copy takes half the time of a new hasher, whose parameters would be parsed each time.
    new_hasher, digests = blake2b(digest_size=8, person=_PERSON).copy, bytearray()
    for value in values:
        hasher = new_hasher()
        hasher.update(canonical(value))
        digests += hasher.digest()
    codes = _plain(encoded.indices, np.int64)
    return mix(np.frombuffer(digests, "<u8").astype(np.uint64)[codes] ^ tag)


def _decimal_bytes(value: Decimal) -> bytes:
    """Bytes that are equal for equal values of all scales."""
    return format(value.normalize(), "e").encode()
