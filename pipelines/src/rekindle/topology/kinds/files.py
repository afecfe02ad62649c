"""Sources and sinks of the kind `files`: what a manifest says of them.

Design: docs/design/exactly-once.md#sources, docs/design/exactly-once.md#sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import pyarrow as pa
from pydantic import Field

from rekindle.errors import Problem
from rekindle.topology.kinds.base import SinkOptions, SourceOptions
from rekindle.topology.problems import nearest
from rekindle.topology.sql.ddl import TIMESTAMP


class FilesSourceSpec(SourceOptions):
    connector: ClassVar[str | None] = "files_source:open_files"

    url: str
    """URL of a file, or a pattern with `*`, `?` and `[...]` for several; any scheme of fsspec."""
    format: Literal["csv", "parquet", "json"]
    """Format of the files; `json` has one object a line."""
    order_by: str | None = None
    """Column by which rows are ordered; without it, they keep the order of the files."""
    speedup: float | None = Field(None, gt=0)
    """Event time runs this many times faster than the clock. Exactly one of `speedup` and
    `rowsPerSecond`."""
    rows_per_second: float | None = Field(None, gt=0)
    """Rows a second. Exactly one of `speedup` and `rowsPerSecond`."""
    null_value: str = "NA"
    """CSV text that means NULL."""

    @property
    def input_url(self) -> str:
        return self.url

    def describe(self) -> str:
        return f"{self.format} {self.url}"

    def check(self, event_time: str | None, path: str) -> Iterator[Problem]:
        if (self.speedup is None) == (self.rows_per_second is None):
            both = self.speedup is not None
            what = "has both speedup and rowsPerSecond" if both else "has no pace"
            hint = "speedup: event time runs so many times faster than the clock; or rowsPerSecond"
            yield Problem(path, "ExactlyOneOf", what, hint)
        if self.speedup is not None and self.order_by is None and event_time is None:
            what = "needs a column of time to run faster than the clock"
            yield Problem(f"{path}.speedup", "NoEventTime", what, "set eventTime or orderBy")

    def check_columns(
        self, schema: pa.Schema, event_time: str | None, path: str
    ) -> Iterator[Problem]:
        column = self.order_by
        if column is None:
            return
        if column not in schema.names:
            what, hint = f"unknown column {column}", nearest(column, schema.names)
            yield Problem(f"{path}.orderBy", "UnknownColumn", what, hint)
            return
        timed = event_time is not None or schema.field(column).type == TIMESTAMP
        if self.speedup is not None and not timed:
            what = f"speedup needs a time to go by, and {column} is no TIMESTAMP"
            yield Problem(f"{path}.speedup", "NoEventTime", what, "set eventTime")


class FilesSinkSpec(SinkOptions):
    connector: ClassVar[str | None] = "files_sink:open_sink"

    url: str
    """Directory of the files, for this query alone; schemes as of `spec.checkpoint.store`."""
    format: Literal["parquet", "json"] = "parquet"
    """Format of the files; `json` has one object a line."""

    @property
    def output_url(self) -> str:
        return self.url
