"""Runs: immutable sorted tables of rows, and how rows are merged. Pure.

A row of a run is the partial aggregate of one group in one pane: `__w` (start of the pane in
microseconds), `__h` (hash of the key), the key columns `__k0`, `__k1` and so on, and the partials.
Rows are ordered by (pane, hash, key); rows with equal group and pane, which only a delta of several
epochs has, are in the order of epochs. A bucket is a range of hashes, so it is contiguous in each
pane of a run.

`fold` is a left fold in the order of rows, so the bits of a result depend only on that order. The
first addend of a sum of doubles is 0.0: folding in one or in many steps gives the same bits. A row
that is a *value* is all of its group up to there: what comes before it is not folded.

A table may keep its rows instead (`RunShape.kept`). Then a pane is a slice of time, a row also has
its time `__t` and its number `__i`, which tells it from all others of the table, and the order is
(pane, hash, time, number). Rows with equal hashes and different keys are not separated. `fold` only
sorts.

Design: docs/decisions/0044-window-state.md, docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.engine.canonical_order import from_comparable, to_comparable

PANE, HASH = "__w", "__h"
TIME, NUMBER = "__t", "__i"
KEY = "__k"
"""Prefix of the names of key columns."""
BUCKET_BITS = 10
BUCKETS = 1 << BUCKET_BITS
"""Number of buckets of an operator's state; the bucket of a row is the highest bits of its hash.
Partitions use the hash modulo their number, so each partition has rows in all buckets. Must not
change without a new state format."""
_SHIFT = 64 - BUCKET_BITS

Merge = Literal["sum", "min", "max", "newest"]
"""How partials of one group and pane are merged; `newest`: replaced."""
Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RunShape:
    """The columns of an operator's runs."""

    keys: tuple[pa.DataType, ...]
    partials: tuple[tuple[str, pa.DataType, Merge], ...] = ()
    kept: tuple[tuple[str, pa.DataType], ...] | None = None
    """The values of rows that are kept; None: rows are merged."""

    @property
    def key_names(self) -> list[str]:
        return [f"{KEY}{i}" for i in range(len(self.keys))]

    @cached_property
    def schema(self) -> pa.Schema:
        keys = zip(self.key_names, self.keys, strict=True)
        partials = (
            (name, partial_type(data_type, merge)) for name, data_type, merge in self.partials
        )
        place = [(PANE, pa.int64()), (HASH, pa.uint64())]
        if self.kept is not None:
            return pa.schema([*place, (TIME, pa.int64()), (NUMBER, pa.int64()), *keys, *self.kept])
        return pa.schema([*place, *keys, *partials])


def partial_type(data_type: pa.DataType, merge: str) -> pa.DataType:
    """Decimal sums have full precision, so that an overflow does not depend on how many epochs are
    merged at once."""
    if merge == "sum" and pa.types.is_decimal(data_type):
        return pa.decimal128(38, data_type.scale)
    return data_type


class RunId:
    """Identifies the content of a run in this process, wherever it is kept."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False)
class RunFile:
    """A memory-mapped file of runs; its space is freed when the last of them is dropped."""

    nbytes: int


class Run:
    """`table` has at most one chunk; `file` contains its buffers, if they are not in memory."""

    def __init__(
        self, table: pa.Table, id: RunId | None = None, file: RunFile | None = None
    ) -> None:
        self.id = id or RunId()
        self._table = table
        self._file = file

    @property
    def is_available(self) -> bool:
        """Whether its rows can be read without waiting (see `engine.state.remote`)."""
        return True

    @property
    def table(self) -> pa.Table:
        return self._table

    @property
    def file(self) -> RunFile | None:
        return self._file

    @property
    def in_memory(self) -> bool:
        return self.file is None

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def nbytes(self) -> int:
        return int(self.table.nbytes)

    @property
    def pane_range(self) -> tuple[int, int]:
        """Its first and its last pane."""
        return int(self.panes[0]), int(self.panes[-1])

    def select(self, names: Sequence[str]) -> Run:
        """The same run with its columns in this order."""
        return Run(self.table.select(names), self.id, self.file)

    @cached_property
    def panes(self) -> Int64s:
        return int64s(self.table.column(PANE))

    @cached_property
    def hashes(self) -> Uint64s:
        return uint64s(self.table.column(HASH))

    @cached_property
    def panes_at(self) -> tuple[tuple[int, int, int], ...]:
        """Its panes, each with the indices of its first row and of that after its last one."""
        starts = np.flatnonzero(np.diff(self.panes, prepend=self.panes[0] - 1))
        ends = np.append(starts[1:], self.rows)
        columns = (self.panes[starts], starts, ends)
        return tuple(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def times(self) -> Int64s:
        return int64s(self.table.column(TIME))

    @property
    def numbers(self) -> Int64s:
        return int64s(self.table.column(NUMBER))

    def position(self, pane: int, bucket: int) -> int:
        """The index of the first row at or after a bucket of a pane; `bucket` may be BUCKETS, which
        is after all buckets."""
        first = int(np.searchsorted(self.panes, pane, "left"))
        if not bucket:
            return first
        last = int(np.searchsorted(self.panes, pane, "right"))
        if bucket >= BUCKETS:
            return last
        lowest = np.uint64(bucket << _SHIFT)
        return first + int(np.searchsorted(self.hashes[first:last], lowest, "left"))

    def buckets(self) -> Int64s:
        """The bucket of each row."""
        return bucket_of(self.hashes)


def int64s(column: pa.ChunkedArray) -> Int64s:
    """A column without NULLs as an array; not copied if it has one chunk."""
    if column.num_chunks == 1:
        return column.chunk(0).to_numpy()  # type: ignore[no-any-return]
    return column.to_numpy()  # type: ignore[no-any-return]


def uint64s(column: pa.ChunkedArray) -> Uint64s:
    return int64s(column)  # type: ignore[return-value]


def bucket_of(hashes: Uint64s) -> Int64s:
    return (hashes >> np.uint64(_SHIFT)).astype(np.int64)


def rows_within(most_rows: int, most_bytes: int, rows: int, nbytes: int) -> int:
    """How many rows fit into both `most_rows` and `most_bytes`, at least 1, if `rows` rows have
    `nbytes`."""
    return max(1, min(most_rows, most_bytes * rows // max(1, nbytes)))


def sort(rows: pa.Table) -> pa.Table:
    """Rows in the order of runs; those of one group and pane stay in their order."""
    rows = rows.combine_chunks()
    if not rows.num_rows:
        return rows
    order = _order_of_kept(rows) if TIME in rows.schema.names else _groups(rows)[0]
    return rows if _is_identity(order) else rows.take(pa.array(order))


def concatenate(shape: RunShape, tables: Sequence[pa.Table]) -> pa.Table:
    tables = [t for t in tables if t.num_rows]
    return pa.concat_tables(tables).combine_chunks() if tables else shape.schema.empty_table()


def fold(shape: RunShape, tables: Sequence[pa.Table], are_values: Sequence[bool] = ()) -> pa.Table:
    """One row for each group and pane: all its rows, merged from left to right; in the order of
    runs. `are_values`: for each table whether its rows are values; no table's are if it is
    empty."""
    rows = concatenate(shape, tables)
    if shape.kept is not None or not rows.num_rows:
        return sort(rows)
    order, first = _groups(rows)
    if any(are_values):
        order, first = _from_values_on(order, first, of_rows(tables, are_values))
    starts = np.flatnonzero(first)
    is_sorted = _is_identity(order)
    first_rows = order[starts]
    merges = {name: merge for name, _, merge in shape.partials}
    columns = []
    for at, column in enumerate(shape.schema):
        values = _array(rows.column(at))
        if column.name not in merges:
            unchanged = is_sorted and len(first_rows) == len(order)
            columns.append(values if unchanged else _take(values, first_rows))
            continue
        ordered = values if is_sorted else _take(values, order)
        columns.append(_merge(ordered, column.type, merges[column.name], starts))
    return pa.Table.from_arrays(columns, schema=shape.schema)


def of_rows(tables: Sequence[pa.Table], of_tables: Sequence[bool]) -> npt.NDArray[np.bool_]:
    """For each row of the concatenation of these tables, what its table has."""
    return np.repeat(np.array(of_tables, dtype=np.bool_), [t.num_rows for t in tables])


def _from_values_on(
    order: Int64s, first: npt.NDArray[np.bool_], is_value: npt.NDArray[np.bool_]
) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """What `_groups` returns, without the rows of each group before its last value."""
    starts, at = np.flatnonzero(first), np.arange(len(order))
    last = np.maximum.reduceat(np.where(is_value[order], at, -1), starts)
    begin = np.repeat(np.maximum(last, starts), np.diff(starts, append=len(order)))
    kept = at >= begin
    return order[kept], (at == begin)[kept]


def without_replaced(rows: pa.Table, is_value: npt.NDArray[np.bool_]) -> Int64s:
    """The numbers, ascending, of the rows that are folded. `is_value`: for each row."""
    order, first = _groups(rows)
    return np.sort(_from_values_on(order, first, is_value)[0])


def group_sizes(rows: pa.Table) -> Int64s:
    """For each row, how many rows its group has in its pane."""
    order, first = _groups(rows)
    sizes = np.diff(np.flatnonzero(first), append=len(order))
    of_each = np.empty(len(order), dtype=np.int64)
    of_each[order] = np.repeat(sizes, sizes)
    return of_each


def are_in(rows: pa.Table, groups: pa.Table) -> npt.NDArray[np.bool_]:
    """For each row whether `groups` has a row of its group and pane."""
    if not rows.num_rows or not groups.num_rows:
        return np.zeros(rows.num_rows, dtype=np.bool_)
    names = [PANE, HASH, *_keys(rows)]
    both = pa.concat_tables([groups.select(names), rows.select(names)]).combine_chunks()
    order, first = _groups(both)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(first) - 1
    known = np.zeros(len(order), dtype=np.bool_)
    known[number[: groups.num_rows]] = True
    return known[number[groups.num_rows :]]


def group_numbers(rows: pa.Table) -> Int64s:
    """The number of each row's group: rows of one key have the same, in whatever panes."""
    rows = rows.set_column(0, PANE, pa.array(np.zeros(rows.num_rows, dtype=np.int64)))
    order, first = _groups(rows.combine_chunks())
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(first) - 1
    return numbers


def numbers_of_ranges(firsts: Int64s, lengths: Int64s) -> Int64s:
    """The numbers in each range (its first number, its length), one range after another."""
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    numbers: Int64s = np.repeat(firsts, lengths) + within
    return numbers


def _order_of_kept(rows: pa.Table) -> Int64s:
    columns = [int64s(rows.column(name)) for name in (NUMBER, TIME, HASH, PANE)]
    order: Int64s = np.lexsort(columns)
    return order


def take_rows(parts: Sequence[pa.Table], chosen: npt.NDArray[np.integer[Any]]) -> pa.Table:
    """The rows with these numbers in the concatenation of `parts`, in this order. Arrow's `take` of
    a chunked array would copy the whole column of strings for each call."""
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    order = np.argsort(chosen, kind="stable")
    ascending = chosen[order].astype(np.int64)
    bounds = np.searchsorted(ascending, starts)
    found = [
        part.take(pa.array(ascending[low:high] - start))
        for part, start, low, high in zip(parts, starts, bounds, bounds[1:], strict=False)
        if high > low
    ]
    if not found:
        return parts[0].slice(0, 0)
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    return pa.concat_tables(found).combine_chunks().take(pa.array(inverse))


def _groups(rows: pa.Table) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """The stable order of rows by (pane, hash, key), and which of them, in this order, begin a
    group. Keys are only compared where hashes are equal."""
    panes, hashes = int64s(rows.column(PANE)), uint64s(rows.column(HASH))
    if panes[0] == panes[-1] and (panes == panes[0]).all():
        order = np.argsort(hashes, kind="stable")
    else:
        order = np.lexsort((hashes, panes))
    pane, hashed = panes[order], hashes[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (hashed[1:] != hashed[:-1]) | (pane[1:] != pane[:-1])
    repeated = np.flatnonzero(~first)
    if len(repeated) and not _equal_keys(rows, order[repeated], order[repeated - 1]).all():
        return _groups_by_keys(rows)
    return order, first


def _groups_by_keys(rows: pa.Table) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """As `_groups`, for rows in which different keys have equal hashes: sorts by keys, too."""
    columns = {PANE: rows.column(PANE), HASH: rows.column(HASH)}
    for name in _keys(rows):
        columns[name] = _comparable(_array(rows.column(name)))
    columns["__row"] = pa.array(np.arange(rows.num_rows))
    by = [(name, "ascending") for name in columns]
    order = pc.sort_indices(pa.table(columns), by).to_numpy().astype(np.int64)
    pane, hashed = int64s(rows.column(PANE))[order], uint64s(rows.column(HASH))[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (hashed[1:] != hashed[:-1]) | (pane[1:] != pane[:-1])
    first[1:] |= ~_equal_keys(rows, order[1:], order[:-1])
    return order, first


def _equal_keys(rows: pa.Table, one: Int64s, other: Int64s) -> npt.NDArray[np.bool_]:
    equal = np.ones(len(one), dtype=np.bool_)
    for name in _keys(rows):
        values = _array(rows.column(name))
        equal &= equal_values(_take(values, one), _take(values, other))
    return equal


def equal_values(one: pa.Array, other: pa.Array) -> npt.NDArray[np.bool_]:
    """Which values are equal as keys: NULL and NaN equal themselves, and −0.0 equals 0.0."""
    left, right = _comparable(one), _comparable(other)
    nulls = pc.and_(left.is_null(), right.is_null())
    found = pc.or_(pc.fill_null(pc.equal(left, right), False), nulls)
    equal: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    return equal


def _keys(rows: pa.Table) -> list[str]:
    return [name for name in rows.schema.names if name.startswith(KEY)]


def _comparable(values: pa.Array) -> pa.Array:
    """Values for comparison, in which NaN equals itself, and −0.0 equals 0.0."""
    if pa.types.is_floating(values.type):
        return to_comparable(values.cast(pa.float64()))
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.int8())
    return values


def _merge(values: pa.Array, data_type: pa.DataType, merge: Merge, starts: Int64s) -> pa.Array:
    """Merges the values between `starts` from left to right; NULLs are ignored, but not by
    `newest`."""
    if merge == "newest":
        return _take(values, np.append(starts[1:], len(values)) - 1)
    if merge == "sum" and pa.types.is_floating(data_type):
        return _sum_doubles(values, data_type, starts)
    if merge == "sum" and pa.types.is_integer(data_type):
        numbers, valid = _numbers(values)
        numbers = np.where(valid, numbers, 0) if valid is not None else numbers
        return _result(
            np.add.reduceat(numbers, starts, dtype=numbers.dtype), data_type, valid, starts
        )
    if merge != "sum" and pa.types.is_floating(data_type):  # also a single value: −0.0 becomes 0.0
        merged = _merge(to_comparable(values.cast(pa.float64())), pa.int64(), merge, starts)
        return from_comparable(merged).cast(data_type)
    if len(starts) == len(values):
        return values
    if merge != "sum" and _is_number(data_type):
        numbers, valid = _numbers(values)
        if valid is not None:
            limits = np.iinfo(numbers.dtype)
            numbers = np.where(valid, numbers, limits.max if merge == "min" else limits.min)
        ufunc = np.minimum if merge == "min" else np.maximum
        return _result(ufunc.reduceat(numbers, starts), data_type, valid, starts)
    return _merge_others(values, data_type, merge, starts)


def _sum_doubles(values: pa.Array, data_type: pa.DataType, starts: Int64s) -> pa.Array:
    """Sums from left to right: `bincount` adds weights one after another, beginning with 0.0."""
    valid = _valid(values)
    floats = pc.fill_null(values, 0.0) if valid is not None else values
    numbers = floats.cast(pa.float64()).to_numpy(zero_copy_only=False)
    lengths = np.diff(starts, append=len(numbers))
    ids = np.repeat(np.arange(len(starts)), lengths)
    sums = np.bincount(ids, weights=numbers, minlength=len(starts))
    return _result(sums, data_type, valid, starts)


def _is_number(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(data_type) or types.is_date32(data_type) or types.is_timestamp(data_type)
    )


def _numbers(values: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    valid = _valid(values)
    if pa.types.is_date32(values.type):
        values = values.view(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.view(pa.int64())
    if valid is not None:
        values = pc.fill_null(values, pa.scalar(0, values.type))
    return values.to_numpy(zero_copy_only=False), valid


def _result(
    numbers: npt.NDArray[Any],
    data_type: pa.DataType,
    valid: npt.NDArray[np.bool_] | None,
    starts: Int64s,
) -> pa.Array:
    missing = None if valid is None else ~np.logical_or.reduceat(valid, starts)
    result = pa.array(numbers, mask=missing)
    return result if result.type == data_type else result.cast(data_type)


def _merge_others(
    values: pa.Array, data_type: pa.DataType, merge: Merge, starts: Int64s
) -> pa.Array:
    """Merges strings, decimals, booleans and binaries with Arrow, on one thread; their result does
    not depend on the order of rows."""
    lengths = np.diff(starts, append=len(values))
    ids = pa.array(np.repeat(np.arange(len(starts)), lengths))
    table = pa.table({"i": ids, "v": values})
    merged = table.group_by("i", use_threads=False).aggregate([("v", merge)])
    found = int64s(merged.column("i"))
    result = _array(merged.column(f"v_{merge}"))
    if not _is_identity(found):
        result = _take(result, np.argsort(found, kind="stable"))
    return result if result.type == data_type else result.cast(data_type)


def _valid(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Which values are not NULL; None if there are no NULLs."""
    if not values.null_count:
        return None
    return values.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _take(values: pa.Array, rows: Int64s) -> pa.Array:
    return values.take(pa.array(rows))


def _is_identity(order: Int64s) -> bool:
    return bool((order == np.arange(len(order))).all())
