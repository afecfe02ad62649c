"""What is read of a `files` source, and which columns decide on the order and epochs of its rows.

A *unit* of the input is a row group of a Parquet file, or a whole file of another format. Units are
numbered in file order; unit u belongs to partition u mod `partitions`. Every partition needs the
key columns of all units, because order and epochs are those of the whole input. Pure.

Design: docs/design/exactly-once.md#partitions-of-a-files-source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.files_read import FoundFile, RowGroupSelection
from rekindle.errors import SourceFailed
from rekindle.objects import to_json
from rekindle.topology.kinds.files import FilesSourceSpec
from rekindle.topology.schema import Schema
from rekindle.topology.sql.event_time import Expression, columns_of, parse_event_time

PREPARED_FORMAT = (
    7  # of the index and the copy of rows that a source prepares; others are made again
)


@dataclass(frozen=True, slots=True)
class PreparationJob:
    """What the preparation of one partition of a source needs."""

    name: str
    files: FilesSourceSpec
    columns: Schema
    event_time: str | None
    expression: str | None
    epoch_interval_us: int
    partition: int = 0
    partitions: int = 1
    verifies_checksums: bool = True
    """Whether rows have checksums, and files digests (`SourceContext`)."""

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self.columns)

    @property
    def raw(self) -> pa.Schema:
        """The columns that are read from the files."""
        computed = {self.files.file_name_column, self.event_time if self.expression else None}
        return pa.schema([f for f in self.schema if f.name not in computed])

    @property
    def computed_event_time(self) -> Expression | None:
        if self.expression is None:
            return None
        raw = Schema(tuple(f for f in self.columns if f.name != self.event_time))
        return parse_event_time(self.expression, raw)

    @property
    def time_column(self) -> str | None:
        """The column whose times assign rows to epochs."""
        order_by = self.files.order_by
        if order_by is not None:
            data_type = self.schema.field(order_by).type
            if pa.types.is_timestamp(data_type) or pa.types.is_date(data_type):
                return order_by
        return self.event_time

    @property
    def keys(self) -> pa.Schema:
        """The columns that decide on order and epochs. If there are none, any column of the files,
        because rows have to be counted."""
        names = {self.files.order_by, self.event_time} - {None} or {self.raw.names[0]}
        return pa.schema([f for f in self.schema if f.name in names])

    def for_keys(self) -> PreparationJob:
        """A job that reads only the columns from which those of `keys` are computed."""
        needed = {*self.keys.names, *columns_of(self.computed_event_time)}
        if not needed & {*self.raw.names}:
            needed.add(self.raw.names[0])
        if self.files.format == "csv" and not self.files.header:
            needed.update(self.raw.names)  # columns are found by position
        columns = Schema(tuple(f for f in self.columns if f.name in needed))
        files = self.files
        if files.file_name_column not in needed:
            files = files.model_copy(update={"file_name_column": None})
        return replace(self, columns=columns, files=files)

    def own_groups(self, group_counts: Iterable[int]) -> Iterator[RowGroupSelection]:
        """The row groups of each file that belong to this partition; `group_counts`: the number of
        row groups of each file."""
        before = 0
        for count in group_counts:
            yield RowGroupSelection((self.partition - before) % self.partitions, self.partitions)
            before += count


def require_order_and_speed(job: PreparationJob) -> None:
    """Raises SourceFailed for a job whose rows cannot be ordered or assigned to epochs."""
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
    if files.speedup is not None and job.time_column is None:
        raise SourceFailed(
            f"source {job.name}: speedup needs a column of times; give eventTime, or an orderBy "
            "column of type TIMESTAMP or DATE, or use rowsPerSecond"
        )


def fingerprint(job: PreparationJob, found: list[FoundFile]) -> str:
    """Hash of all that the prepared files depend on; it is part of their names."""
    parts = {
        "version": PREPARED_FORMAT,
        "pyarrow": pa.__version__,  # the checksums depend on its layout
        "files": [(f.path, f.identity) for f in found],
        "spec": job.files.model_dump(mode="json"),
        "schema": job.schema.to_string(),
        "event_time": job.event_time,
        "expression": job.expression,
        "interval_us": job.epoch_interval_us,
        "partition": [job.partition, job.partitions],
    }
    if not job.verifies_checksums:
        parts["verified"] = False
    return hashlib.blake2b(to_json(parts), digest_size=8).hexdigest()
