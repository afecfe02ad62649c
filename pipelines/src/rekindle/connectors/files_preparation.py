"""Preparing a `files` source: its rows, sorted once, and the index of its epochs.

Parquet that is in order, with small row groups, stays where it is: only the index is written, and
cuts read the input files (`connectors.rows_in_place`). Other input is read once, sorted (stable) by
`orderBy` and written to the task's disk as one Arrow file. The name of a prepared file contains a
hash of spec, schema, and each input file's size and time, so a changed input is prepared again.

The tuple time t of a row is its `orderBy` column if that is a time, else its event time. A row
whose t is lower than an earlier row's, or NULL, belongs to the same epoch as the row before it.
With `speedup` a row's epoch is floor(((t − t_first) / speedup) / Δ), with `rowsPerSecond` floor((i
/ rowsPerSecond) / Δ).

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.cuts import (
    INT64_MAX,
    MAX_EPOCH,
    Int64s,
    epochs_by_count,
    epochs_by_time,
    exact_fraction,
    first_row,
)
from rekindle.connectors.event_time import with_event_time
from rekindle.connectors.files_read import (
    FoundFile,
    find_files,
    largest_row_group_bytes,
    read_batches,
)
from rekindle.connectors.input_identity import encode, identify
from rekindle.connectors.prepared import (
    IN_PLACE,
    MappedRows,
    Rows,
    checksums,
    open_memory_mapped,
    publish,
    reordered,
    with_checksum,
    write_rows,
)
from rekindle.connectors.rows_in_place import RowsInPlace
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle.objects import to_json
from rekindle.streams.epochs import NO_WATERMARK
from rekindle.topology.kinds.files import FilesSourceSpec
from rekindle.topology.schema import Schema
from rekindle.topology.sql.event_time import parse_event_time

VERSION = 5
IN_PLACE_BYTES = 64 << 20
"""A larger row group is copied to disk: a reader in place holds one, compressed, all the time."""
INPUT_KEY = b"rekindle.input"  # in the index's metadata, as the next
SUMMARY_KEY = b"rekindle.extent"  # the first and last event time, JSON
_INDEX = pa.schema([(name, pa.int64()) for name in ("epoch", "start", "max_time", "checksum")])


@dataclass(frozen=True, slots=True)
class Job:
    """What the preparation of a source needs."""

    name: str
    files: FilesSourceSpec
    columns: Schema
    event_time: str | None
    expression: str | None
    epoch_interval_us: int

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self.columns)

    @property
    def raw(self) -> pa.Schema:
        """The columns that are read from the files."""
        made = {self.files.file_name_column, self.event_time if self.expression else None}
        return pa.schema([f for f in self.schema if f.name not in made])


def check(job: Job) -> None:
    files = job.files
    if files.order_by is not None and files.order_by not in job.schema.names:
        raise SourceFailed(
            f"source {job.name}: orderBy names {files.order_by}, which is not in the schema "
            f"({', '.join(job.schema.names)})"
        )
    if files.speedup is None and files.rows_per_second is None:
        raise SourceFailed(
            f"source {job.name}: files need a replay speed; set speedup (by event time) or "
            "rowsPerSecond"
        )
    if files.speedup is not None and _time_column(job) is None:
        raise SourceFailed(
            f"source {job.name}: speedup needs a column of times; give eventTime, or an orderBy "
            "column of type TIMESTAMP or DATE, or use rowsPerSecond"
        )


def _time_column(job: Job) -> str | None:
    """The column whose times assign rows to epochs."""
    order_by = job.files.order_by
    if order_by is not None:
        kind = job.schema.field(order_by).type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return order_by
    return job.event_time


def fingerprint(job: Job, found: list[FoundFile]) -> str:
    parts = {
        "version": VERSION,
        "pyarrow": pa.__version__,  # the checksums depend on its layout
        "files": [(f.path, f.identity) for f in found],
        "spec": job.files.model_dump(mode="json"),
        "schema": job.schema.to_string(),
        "event_time": job.event_time,
        "expression": job.expression,
        "interval_us": job.epoch_interval_us,
    }
    return hashlib.blake2b(to_json(parts), digest_size=8).hexdigest()


def prepare(job: Job, fs: Any, found: list[FoundFile], rows: Path, index: Path) -> None:
    """Write the index, and the rows unless they can stay where they are. The index is created last:
    if it exists, the rows are complete."""
    token = uuid.uuid4().hex
    stage, final = (rows.with_name(f".{rows.name}.{token}.{s}") for s in ("stage", "sorted"))
    try:
        table = _index_in_place(job, fs, found)
        if table is None:
            table = _copy(job, fs, found, rows, stage, final)
        else:
            rows.unlink(missing_ok=True)
        write_rows(final, table.schema, [table.to_batches()])
        publish(final, index)
    finally:
        stage.unlink(missing_ok=True)
        final.unlink(missing_ok=True)


def _copy(
    job: Job, fs: Any, found: list[FoundFile], rows: Path, stage: Path, final: Path
) -> pa.Table:
    """Stage the input in file order and write it sorted. Returns its index."""
    counts = write_rows(stage, job.schema, _read_all(job, fs, found))
    metadata = {INPUT_KEY: _identify(job, fs, found)}
    staged = open_memory_mapped(stage)
    order = _order(job, staged, found, counts)
    if order is None:
        stage.replace(final)
    else:
        write_rows(final, job.schema, [reordered(staged, int64s(order))])
    del staged
    publish(final, rows)
    table = open_memory_mapped(rows)
    metadata[SUMMARY_KEY] = _summary(job, table)
    return with_checksum(_index(job, table, MappedRows(table)), metadata)


def _index_in_place(job: Job, fs: Any, found: list[FoundFile]) -> pa.Table | None:
    """The index of Parquet that is in order and has small row groups; None of other input. Reads it
    twice: the columns that decide on order and epochs, then all, for the checksums."""
    if job.files.format != "parquet" or not job.raw.names:
        return None
    largest = (largest_row_group_bytes(fs, f.path, job.raw.names, job.name) for f in found)
    if max(largest) > IN_PLACE_BYTES:
        return None
    batches = [list(_read_keys(job, fs, file)) for file in found]
    counts = [sum(batch.num_rows for batch in part) for part in batches]
    schema = pa.schema([f for f in job.schema if f.name in _keys(job)])
    keys = pa.Table.from_batches([batch for part in batches for batch in part], schema)
    if _order(job, keys, found, counts) is not None:
        return None
    table = _index(job, keys, open_in_place(job, fs, found, counts))
    metadata = {
        INPUT_KEY: _identify(job, fs, found),
        SUMMARY_KEY: _summary(job, keys),
        IN_PLACE: to_json(counts),
    }
    return with_checksum(table, metadata)


def open_in_place(job: Job, fs: Any, found: list[FoundFile], counts: list[int]) -> RowsInPlace:
    """The rows of files that have so many rows each."""

    def read_from(row: int) -> Iterator[pa.RecordBatch]:
        for file, count in zip(found, counts, strict=True):
            if row < count:
                yield from _read(job, fs, file, row)
            row = max(0, row - count)

    return RowsInPlace(job.name, job.schema, sum(counts), read_from)


def _keys(job: Job) -> list[str]:
    """Columns that decide on order and epochs; one of the file's if there are none, for its
    rows have to be counted."""
    keys = [name for name in (job.files.order_by, job.event_time) if name is not None]
    return keys or [job.raw.names[0]]


def _read_keys(job: Job, fs: Any, file: FoundFile) -> Iterator[pa.RecordBatch]:
    wanted = _keys(job)
    if job.expression is None and any(name in job.raw.names for name in wanted):
        job = replace(job, columns=Schema(tuple(f for f in job.columns if f.name in wanted)))
    names = [name for name in job.schema.names if name in wanted]
    return (batch.select(names) for batch in _read(job, fs, file))


def _identify(job: Job, fs: Any, found: list[FoundFile]) -> bytes:
    input_files = identify(fs, [file.path for file in found], job.name)
    _require_unchanged(job, found)
    return encode(input_files)


def _summary(job: Job, table: pa.Table) -> bytes:
    if job.event_time is None:
        return to_json([None, None])
    times = pc.min_max(table.column(job.event_time))
    return to_json([times["min"].value, times["max"].value])


def _read_all(job: Job, fs: Any, found: list[FoundFile]) -> Iterator[Iterator[pa.RecordBatch]]:
    for file in found:
        yield _read(job, fs, file)


def _read(job: Job, fs: Any, file: FoundFile, first_row: int = 0) -> Iterator[pa.RecordBatch]:
    """The rows of one file, with the columns that are computed from them."""
    batches = read_batches(fs, file.path, job.files, job.raw, job.name, first_row)
    if job.files.file_name_column is not None:
        batches = _with_name(batches, job.files.file_name_column, _text(job, file.name))
    if job.expression is None:
        return batches
    raw = Schema(tuple(f for f in job.columns if f.name != job.event_time))
    expression = parse_event_time(job.expression, raw)
    return with_event_time(batches, expression, job.schema, f"source {job.name}: {file.path}")


def _text(job: Job, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as e:
        shown = name.encode(errors="backslashreplace").decode()
        raise SchemaMismatch(
            f"source {job.name}: the name of {shown} is not UTF-8, so fileNameColumn cannot have "
            "it; rename the file"
        ) from e
    return name


def _with_name(
    batches: Iterator[pa.RecordBatch], column: str, name: str
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        names = pa.array([name] * batch.num_rows, pa.string())
        yield batch.append_column(pa.field(column, pa.string()), names)


def _require_unchanged(job: Job, found: list[FoundFile]) -> None:
    """A file that is still being copied would be staged incompletely."""
    _, now = find_files(job.files.url, job.name)
    changed = sorted({file.path for file in {*found} ^ {*now}})
    if changed:
        raise SourceFailed(
            f"source {job.name}: {', '.join(changed[:3])} changed while it was read; it will be "
            "read again, and must not change after that"
        )


def _order(
    job: Job, staged: pa.Table, found: list[FoundFile], counts: list[int]
) -> pa.Array | None:
    """The permutation of the stable sort; None if the input is in order."""
    if job.files.order_by is None:
        return None
    key = staged.column(job.files.order_by)
    if key.null_count:
        row = int(pc.index(key.is_null(), True).as_py())
        for file, count in zip(found, counts, strict=True):
            if row < count:
                raise SchemaMismatch(
                    f"source {job.name}: {file.path}: column {job.files.order_by}, row {row + 1}: "
                    "rows cannot be ordered by NULL; remove the row, or order by another "
                    "column"
                )
            row -= count
    order = pc.sort_indices(pa.table({"key": key}), sort_keys=[("key", "ascending")])
    positions = int64s(order.cast(pa.int64()))
    return None if np.array_equal(positions, np.arange(len(positions))) else order


def _index(job: Job, table: pa.Table, rows: Rows) -> pa.Table:
    """One row for each epoch that has rows: its first row, and the newest event time through it.
    `table` has the columns that this needs."""
    if not table.num_rows:
        return _INDEX.empty_table()
    epochs = _epochs(job, table)
    starts = np.flatnonzero(np.diff(epochs, prepend=epochs[0] - 1))
    if job.event_time is None:
        newest = np.full(len(starts), NO_WATERMARK, dtype=np.int64)
    else:
        running = _running_max(table.column(job.event_time))
        newest = running[np.append(starts[1:], table.num_rows) - 1]
    first = starts.astype(np.int64)
    return pa.table([epochs[starts], first, newest, checksums(rows, first)], schema=_INDEX)


def _epochs(job: Job, table: pa.Table) -> Int64s:
    if job.files.speedup is None:
        if job.files.rows_per_second is None:
            raise ValueError("checked in _check")
        rate = job.files.rows_per_second
        if first_row(MAX_EPOCH + 1, rate, job.epoch_interval_us) < table.num_rows:
            raise SchemaMismatch(
                f"source {job.name}: {table.num_rows:,} rows with rowsPerSecond {rate:g} are more "
                f"than {MAX_EPOCH + 1:,} epochs; raise rowsPerSecond"
            )
        return epochs_by_count(table.num_rows, rate, job.epoch_interval_us)
    column = _time_column(job)
    times = _running_max(table.column(column))
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


def _running_max(column: pa.ChunkedArray) -> Int64s:
    """The newest time up to each row, in microseconds; NO_WATERMARK before the first."""
    micros = column.cast(pa.timestamp("us", getattr(column.type, "tz", None))).cast(pa.int64())
    values = int64s(pc.fill_null(micros, NO_WATERMARK))
    return np.maximum.accumulate(values)


def int64s(column: Any) -> Int64s:
    values: Int64s = np.array(column.to_numpy(), dtype=np.int64)
    return values
