"""The order and the epochs of a `files` source's rows, and the index of one partition.

The time t of a row is its `orderBy` column if that is a time, else its event time. A row
whose t is lower than an earlier row's, or NULL, belongs to the same epoch as the row before it.
With `speedup` a row's epoch is floor(((t − t_first) / speedup) / Δ), with `rowsPerSecond` floor((i
/ rowsPerSecond) / Δ). Order and epochs are those of the whole input: the index of each partition
has every epoch, with the watermark after it, and the partition's own rows in it, which may be none.
Pure.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from rekindle.connectors.files_job import PreparationJob
from rekindle.connectors.prepared import Rows
from rekindle.errors import SchemaMismatch
from rekindle.objects import to_json
from rekindle.streams.epochs import NO_WATERMARK

_MAX_DAY = INT64_MAX // 86_400_000_000
PORTION_ROWS = 1 << 18
"""How many rows of the ordered input have their keys in memory at the same time."""
_INDEX = pa.schema([(name, pa.int64()) for name in ("epoch", "start", "max_time", "checksum")])


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that belong to one partition together (see `files_job`). `first_row`: the number of its
    first row in its file; `own`: whether it belongs to the partition that is prepared."""

    path: str
    first_row: int
    rows: int
    own: bool


@dataclass(frozen=True, slots=True)
class OrderedInput:
    """The key columns of all units, in file order, and `order`, the permutation of their stable
    sort; None if the rows are in order."""

    units: Sequence[Unit]
    keys: pa.Table
    order: Int64s | None

    @property
    def own_order(self) -> Int64s | None:
        """The permutation of the partition's rows, numbered without those of others; None if they
        are in order."""
        order = self.order
        if order is None:
            return None
        if not all(unit.own for unit in self.units):
            own = np.repeat([u.own for u in self.units], [u.rows for u in self.units])
            order = (np.cumsum(own) - 1)[order[own[order]]]
        return None if _is_identity(order) else order

    def portions(self) -> Iterator[tuple[int, int]]:
        """Ranges of positions in the sorted order, of at most PORTION_ROWS rows."""
        for first in range(0, self.keys.num_rows, PORTION_ROWS):
            yield first, min(first + PORTION_ROWS, self.keys.num_rows)

    def rows_at(self, first: int, end: int) -> Int64s:
        """Numbers, in file order, of the rows at these positions of the sorted order."""
        if self.order is not None:
            return self.order[first:end]
        return np.arange(first, end)

    def owns(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Which of these rows are the partition's."""
        ends = np.cumsum([unit.rows for unit in self.units])
        own = np.array([unit.own for unit in self.units], dtype=np.bool_)
        found: npt.NDArray[np.bool_] = own[np.searchsorted(ends, rows, side="right")]
        return found


def _is_identity(order: Int64s) -> bool:
    """Whether a permutation changes nothing."""
    return bool(np.array_equal(order, np.arange(len(order))))


def order_input(job: PreparationJob, keys: pa.Table, units: Sequence[Unit]) -> OrderedInput:
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
    in_order = OrderCheck(job)
    try:
        for batch in keys.to_batches(PORTION_ROWS):
            in_order.observe(batch)
    except NotInOrder:
        return OrderedInput(units, keys, _sorted(key))
    return OrderedInput(units, keys, None)


class NotInOrder(Exception):
    """A row belongs before an earlier one, or its key is NULL."""


class OrderCheck:
    """Raises NotInOrder as soon as the rows that it observes are not in order."""

    def __init__(self, job: PreparationJob) -> None:
        self._order_by = job.files.order_by
        self._last: pa.Array | None = None

    def observe(self, batch: pa.RecordBatch) -> None:
        if self._order_by is None or not batch.num_rows:
            return
        key = batch.column(self._order_by)
        rows = key if self._last is None else pa.concat_arrays([self._last, key])
        if key.null_count or not _is_identity(_sorted(rows)):
            raise NotInOrder
        self._last = key.slice(len(key) - 1)


def _sorted(key: pa.Array | pa.ChunkedArray) -> Int64s:
    """The permutation of a stable sort."""
    order = pc.sort_indices(pa.table({"key": key}), sort_keys=[("key", "ascending")])
    found: Int64s = order.to_numpy().view(np.int64)
    return found


def event_time_extent(job: PreparationJob, keys: pa.Table) -> bytes:
    """The first and last event time of all partitions, as JSON."""
    if job.event_time is None:
        return to_json([None, None])
    times = pc.min_max(keys.column(job.event_time))
    return to_json([times["min"].value, times["max"].value])


def build_index(job: PreparationJob, input: OrderedInput, rows: Rows) -> pa.Table:
    """One row for each epoch that has rows in any partition: the number of its first row in
    the partition's `rows`, the newest event time up to the end of the epoch, and a checksum. If the
    input is in order, only one portion of it is in memory at a time."""
    if not input.keys.num_rows:
        return _INDEX.empty_table()
    numbers: list[Int64s] = []
    first: list[Int64s] = []
    newest: list[Int64s] = []
    epochs, times = _Epochs(job, input), _RunningMax(input, job.event_time)
    before, own_before = -1, 0
    for begin, end in input.portions():
        found = epochs.next_portion(begin, end)
        starts = np.flatnonzero(np.diff(found, prepend=before))
        before = int(found[-1])
        mine = input.owns(input.rows_at(begin, end))
        numbers.append(found[starts])
        first.append(own_before + np.cumsum(mine, dtype=np.int64)[starts] - mine[starts])
        own_before += int(mine.sum())
        newest_before, running = times.newest, times.next_portion(begin, end)
        # The newest time of an epoch is known where the next epoch begins.
        newest.append(np.concatenate([[newest_before], running[:-1]])[starts])
    newest.append(np.array([times.newest], dtype=np.int64))
    columns = [np.concatenate(numbers), np.concatenate(first), np.concatenate(newest)[1:]]
    count = len(columns[0])
    sums = rows.checksums(columns[1]) if job.verifies_checksums else np.zeros(count, dtype=np.int64)
    return pa.table([*columns, sums], schema=_INDEX)


class _RunningMax:
    """The highest time of a column up to each position of the sorted order, in microseconds;
    NO_WATERMARK before the first time. Stateful: portions must be requested in order. `newest`: the
    highest time so far."""

    def __init__(self, input: OrderedInput, column: str | None) -> None:
        self.newest = NO_WATERMARK
        self._input = input
        self._values = None if column is None else input.keys.column(column)
        self._all: Int64s | None = None  # of input that is not in order
        if self._values is not None and input.order is not None:
            self._all = _micros(self._values)

    def next_portion(self, begin: int, end: int) -> Int64s:
        """For the positions from `begin` to `end`, which follow the previous portion."""
        if self._values is None:
            return np.full(end - begin, NO_WATERMARK, dtype=np.int64)
        if self._all is None:
            values = _micros(self._values.slice(begin, end - begin))
        else:
            values = self._all[self._input.rows_at(begin, end)]
        values[0] = max(self.newest, int(values[0]))
        running: Int64s = np.maximum.accumulate(values)
        self.newest = int(running[-1])
        return running


class _Epochs:
    """The epoch of each position of the sorted order. Stateful: portions must be requested in
    order. Raises SchemaMismatch if there are too many epochs."""

    def __init__(self, job: PreparationJob, input: OrderedInput) -> None:
        self._job = job
        self._times: _RunningMax | None = None
        self._first_us = NO_WATERMARK
        if job.files.speedup is None:
            self._require_few_rows(input.keys.num_rows)
            return
        _require_dates_in_range(job, input.keys)
        self._first_us = self._first_time(_RunningMax(input, job.time_column), input)
        self._times = _RunningMax(input, job.time_column)

    def next_portion(self, begin: int, end: int) -> Int64s:
        """For the positions from `begin` to `end`, which follow the previous portion."""
        files, interval_us = self._job.files, self._job.epoch_interval_us
        if self._times is None or files.speedup is None:
            assert files.rows_per_second is not None, "checked in require_order_and_speed"
            return epochs_by_count(np.arange(begin, end), files.rows_per_second, interval_us)
        times = self._times.next_portion(begin, end)
        times[times == NO_WATERMARK] = self._first_us
        return epochs_by_time(times, self._first_us, files.speedup, interval_us)

    def _require_few_rows(self, rows: int) -> None:
        job, rate = self._job, self._job.files.rows_per_second
        if rate is None:
            raise ValueError("checked in require_order_and_speed")
        if first_row(MAX_EPOCH + 1, rate, job.epoch_interval_us) < rows:
            raise SchemaMismatch(
                f"source {job.name}: {rows:,} rows with rowsPerSecond {rate:g} are more than "
                f"{MAX_EPOCH + 1:,} epochs; raise rowsPerSecond"
            )

    def _first_time(self, times: _RunningMax, input: OrderedInput) -> int:
        """The first time that is not NULL. Reads all times, to check that there are not too many
        epochs."""
        first_us = NO_WATERMARK
        for begin, end in input.portions():
            running = times.next_portion(begin, end)
            if first_us == NO_WATERMARK and len(known := running[running != NO_WATERMARK]):
                first_us = int(known[0])
        job, column = self._job, self._job.time_column
        if first_us == NO_WATERMARK:
            raise SchemaMismatch(
                f"source {job.name}: column {column} is NULL in every row, so speedup cannot be "
                "used; use rowsPerSecond"
            )
        _require_epochs_in_range(job, column, first_us, times.newest)
        return first_us


def _require_dates_in_range(job: PreparationJob, keys: pa.Table) -> None:
    """A DATE may be further from 1970 than microseconds in 64 bits."""
    column = job.time_column
    if column is None or not pa.types.is_date(keys.schema.field(column).type):
        return
    extent = pc.min_max(keys.column(column).cast(pa.int32()))
    for day in (extent["min"].as_py(), extent["max"].as_py()):
        if day is not None and abs(day) > _MAX_DAY:
            raise SchemaMismatch(
                f"source {job.name}: column {column} has the date {np.datetime64(day, 'D')}, and "
                "speedup counts in microseconds of 64 bits; correct it, or use rowsPerSecond"
            )


def _require_epochs_in_range(
    job: PreparationJob, column: str | None, first_us: int, last_us: int
) -> None:
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


def _micros(column: pa.ChunkedArray) -> Int64s:
    """Times in microseconds; NO_WATERMARK for NULL."""
    micros = column.cast(pa.timestamp("us", getattr(column.type, "tz", None))).cast(pa.int64())
    return int64s(pc.fill_null(micros, NO_WATERMARK))


def int64s(column: Any) -> Int64s:
    values: Int64s = np.array(column.to_numpy(), dtype=np.int64)
    return values
