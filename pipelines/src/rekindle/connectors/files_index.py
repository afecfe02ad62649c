"""The order and the epochs of a `files` source's rows, and the index of one partition.

The tuple time t of a row is its `orderBy` column if that is a time, else its event time. A row
whose t is lower than an earlier row's, or NULL, belongs to the same epoch as the row before it.
With `speedup` a row's epoch is floor(((t − t_first) / speedup) / Δ), with `rowsPerSecond` floor((i
/ rowsPerSecond) / Δ). All of it is of the whole input: a partition's index has every epoch, with
the watermark through it, and the partition's own rows of it, which may be none. Pure.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.connectors.cuts import (
    INT64_MAX,
    MAX_EPOCH,
    Int64s,
    epochs_by_count,
    epochs_by_time,
    exact_fraction,
    first_row,
)
from rekindle.connectors.files_job import Job
from rekindle.connectors.prepared import Rows
from rekindle.errors import SchemaMismatch
from rekindle.objects import to_json
from rekindle.streams.epochs import NO_WATERMARK

_INDEX = pa.schema([(name, pa.int64()) for name in ("epoch", "start", "max_time", "checksum")])


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that belong to one partition together. `first_row`: in its file; `own`: of the
    partition that is prepared."""

    path: str
    first_row: int
    rows: int
    own: bool


@dataclass(frozen=True, slots=True)
class OrderedInput:
    """The key columns of all units, in file order, and the permutation of their stable sort; None
    if they are in order."""

    units: Sequence[Unit]
    keys: pa.Table
    order: Int64s | None

    @property
    def own(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are the partition's, in file order; None if all are."""
        if all(unit.own for unit in self.units):
            return None
        return np.repeat([u.own for u in self.units], [u.rows for u in self.units])

    @property
    def own_order(self) -> Int64s | None:
        """The permutation of the partition's rows; None if they are in order."""
        own, order = self.own, self.order
        if own is not None and order is not None:
            order = (np.cumsum(own) - 1)[order[own[order]]]
        return None if order is None or _is_ascending(order) else order


def _is_ascending(order: Int64s) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))


def order_input(job: Job, keys: pa.Table, units: Sequence[Unit]) -> OrderedInput:
    """Raises SchemaMismatch for a NULL in the `orderBy` column."""
    if job.files.order_by is None:
        return OrderedInput(units, keys, None)
    key = keys.column(job.files.order_by)
    if key.null_count:
        row = int(pc.index(key.is_null(), True).as_py())
        for unit in units:
            if row < unit.rows:
                raise SchemaMismatch(
                    f"source {job.name}: {unit.path}: column {job.files.order_by}, row "
                    f"{unit.first_row + row + 1}: rows cannot be ordered by NULL; remove the row, "
                    "or order by another column"
                )
            row -= unit.rows
    positions = int64s(_sort_indices(key).cast(pa.int64()))
    return OrderedInput(units, keys, None if _is_ascending(positions) else positions)


class NotInOrder(Exception):
    """A row is before an earlier one, or is not in the order at all."""


class OrderCheck:
    """Raises NotInOrder as soon as the rows that it observes are not in order."""

    def __init__(self, job: Job) -> None:
        self._order_by = job.files.order_by
        self._last: pa.Array | None = None

    def observe(self, batch: pa.RecordBatch) -> None:
        if self._order_by is None or not batch.num_rows:
            return
        key = batch.column(self._order_by)
        rows = key if self._last is None else pa.concat_arrays([self._last, key])
        if key.null_count or not _is_ascending(int64s(_sort_indices(rows).cast(pa.int64()))):
            raise NotInOrder
        self._last = key.slice(len(key) - 1)


def _sort_indices(key: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pc.sort_indices(pa.table({"key": key}), sort_keys=[("key", "ascending")])


def event_time_extent(job: Job, keys: pa.Table) -> bytes:
    """The first and last event time of all partitions, as JSON."""
    if job.event_time is None:
        return to_json([None, None])
    times = pc.min_max(keys.column(job.event_time))
    return to_json([times["min"].value, times["max"].value])


def build_index(job: Job, input: OrderedInput, rows: Rows) -> pa.Table:
    """One row for each epoch that has rows in any partition: the first of the partition's `rows`,
    and the newest event time through it."""
    keys, order, own = input.keys, input.order, input.own
    if not keys.num_rows:
        return _INDEX.empty_table()
    epochs = _epochs(job, keys, order)
    starts = np.flatnonzero(np.diff(epochs, prepend=epochs[0] - 1))
    if job.event_time is None:
        newest = np.full(len(starts), NO_WATERMARK, dtype=np.int64)
    else:
        running = _running_max(keys.column(job.event_time), order)
        newest = running[np.append(starts[1:], keys.num_rows) - 1]
    first = starts.astype(np.int64)
    if own is not None:
        mine = own if order is None else own[order]
        first = np.cumsum(mine, dtype=np.int64)[starts] - mine[starts]
    sums = rows.checksums(first) if job.verified else np.zeros(len(first), dtype=np.int64)
    return pa.table([epochs[starts], first, newest, sums], schema=_INDEX)


def _epochs(job: Job, keys: pa.Table, order: Int64s | None) -> Int64s:
    if job.files.speedup is None:
        if job.files.rows_per_second is None:
            raise ValueError("checked in files_job.check")
        rate = job.files.rows_per_second
        if first_row(MAX_EPOCH + 1, rate, job.epoch_interval_us) < keys.num_rows:
            raise SchemaMismatch(
                f"source {job.name}: {keys.num_rows:,} rows with rowsPerSecond {rate:g} are more "
                f"than {MAX_EPOCH + 1:,} epochs; raise rowsPerSecond"
            )
        return epochs_by_count(keys.num_rows, rate, job.epoch_interval_us)
    column = job.time_column
    times = _running_max(keys.column(column), order)
    known = times[times != NO_WATERMARK]
    if not len(known):
        raise SchemaMismatch(
            f"source {job.name}: column {column} is NULL in every row, so speedup cannot be used; "
            "use rowsPerSecond"
        )
    times[times == NO_WATERMARK] = known[0]
    _require_epochs_in_range(job, column, int(times[0]), int(times[-1]))
    return epochs_by_time(times, job.files.speedup, job.epoch_interval_us)


def _require_epochs_in_range(job: Job, column: str | None, first_us: int, last_us: int) -> None:
    """A time that is wrong by thousands of years would need an epoch above MAX_EPOCH."""
    speedup = job.files.speedup or 1.0
    rate = exact_fraction(speedup)
    epoch = (last_us - first_us) * rate.denominator // (rate.numerator * job.epoch_interval_us)
    if epoch > MAX_EPOCH or last_us - first_us > INT64_MAX:
        raise SchemaMismatch(
            f"source {job.name}: column {column} goes from {_iso(first_us)} to {_iso(last_us)}, "
            f"which is {epoch + 1:,} epochs with speedup {speedup:g}; at most "
            f"{MAX_EPOCH + 1:,} are possible: correct the times, or raise speedup"
        )


def _iso(time_us: int) -> str:
    return str(np.datetime64(time_us, "us").astype("datetime64[s]"))


def _running_max(column: pa.ChunkedArray, order: Int64s | None) -> Int64s:
    """The newest time up to each row, in microseconds; NO_WATERMARK before the first."""
    micros = column.cast(pa.timestamp("us", getattr(column.type, "tz", None))).cast(pa.int64())
    values = int64s(pc.fill_null(micros, NO_WATERMARK))
    return np.maximum.accumulate(values if order is None else values[order])


def int64s(column: Any) -> Int64s:
    values: Int64s = np.array(column.to_numpy(), dtype=np.int64)
    return values
