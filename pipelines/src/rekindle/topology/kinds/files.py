"""Sources and sinks of the kind `files`: fields and their validation.

Design: docs/design/exactly-once.md#sources, docs/design/exactly-once.md#sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator

from rekindle.errors import Problem
from rekindle.topology.kinds.base import SinkOptions, SourceOptions
from rekindle.topology.kinds.csv_fields import check_csv_fields
from rekindle.topology.problems import nearest
from rekindle.topology.schema import Field as SchemaField
from rekindle.topology.schema import Scalar, Schema, is_sortable, type_to_ddl

UTF_8: Final = "UTF-8"
Encoding = Literal[
    "UTF-8",
    "UTF-16",
    "UTF-16LE",
    "UTF-16BE",
    "US-ASCII",
    "ISO-8859-1",
    "ISO-8859-2",
    "ISO-8859-15",
    "windows-1250",
    "windows-1251",
    "windows-1252",
    "KOI8-R",
    "GB18030",
    "Big5",
    "Shift_JIS",
    "EUC-JP",
    "EUC-KR",
]


class FilesSourceSpec(SourceOptions):
    connector: ClassVar[str | None] = "files_source:open_source"
    has_raw_columns: ClassVar[bool] = True
    can_be_partitioned: ClassVar[bool] = True
    wrong_field_names: ClassVar[Mapping[str, str]] = {
        "sep": "delimiter",
        "separator": "delimiter",
        "charset": "encoding",
        "path": "url",
        "orderby": "orderBy",
    }

    url: str
    """URL of a file, of a directory for all files below it, or a pattern with `*`, `?` and `[...]`;
    any scheme of fsspec. CSV and JSON files may be compressed (`.gz`, `.bz2`, `.xz`, `.zip`)."""
    format: Literal["csv", "parquet", "json"]
    """Format of the files; `json` has one object on each line."""
    order_by: str | None = None
    """Column by which rows are ordered; without it, they keep the order of the files."""
    speedup: float | None = Field(None, gt=0)
    """Event time runs this many times faster than the clock."""
    rows_per_second: float | None = Field(None, gt=0)
    """Rows for each second."""
    null_value: str = "NA"
    """CSV text that means NULL, unless it is in quotes."""
    file_name_column: str | None = Field(None, min_length=1)
    """STRING column that is added to the schema: the file of each row, as path relative to the
    directory, or from the first wildcard, of `url`."""
    delimiter: str = Field(",", min_length=1, max_length=2)
    """Character between values of a CSV file; `\\t` is a tab."""
    header: bool = True
    """Whether the first line of a CSV file has the column names. If not, the schema lists all
    columns in the order of the file."""
    quote: str = Field('"', max_length=1)
    """Character around CSV values that contain delimiters, line ends or quotes; `""`: none."""
    escape: str | None = Field(None, min_length=1, max_length=1)
    """Escape character of CSV files: the next character is taken literally. A quote inside quotes
    can always be doubled instead."""
    encoding: Encoding = UTF_8
    """Encoding of CSV files."""

    @field_validator("delimiter")
    @classmethod
    def _tab(cls, value: str) -> str:
        return "\t" if value == r"\t" else value

    @property
    def added_columns(self) -> dict[str, SchemaField]:
        name = self.file_name_column
        return {} if name is None else {"fileNameColumn": SchemaField(name, Scalar.STRING)}

    @property
    def input_url(self) -> str:
        return self.url

    @property
    def speed_field(self) -> tuple[str, float] | None:
        if self.speedup is not None:
            return "speedup", self.speedup
        return None if self.rows_per_second is None else ("rowsPerSecond", self.rows_per_second)

    def describe(self) -> str:
        return f"{self.format} {self.url}"

    def check(self, event_time: str | None, path: str) -> Iterator[Problem]:
        if (self.speedup is None) == (self.rows_per_second is None):
            both = self.speedup is not None
            what = (
                "has both speedup and rowsPerSecond"
                if both
                else "has no speedup and no rowsPerSecond"
            )
            hint = "set speedup (event time runs so much faster than the clock) or rowsPerSecond"
            yield Problem(path, "ExactlyOneOf", what, hint)
        if self.speedup is not None and self.order_by is None and event_time is None:
            what = "needs a column of times"
            yield Problem(f"{path}.speedup", "NoEventTime", what, "set eventTime or orderBy")
        yield from check_csv_fields(self, self.format, path)

    def check_columns(self, schema: Schema, event_time: str | None, path: str) -> Iterator[Problem]:
        column = self.order_by
        if column is None:
            return
        if column not in schema.names:
            what, hint = f"unknown column {column}", nearest(column, schema.names)
            yield Problem(f"{path}.orderBy", "UnknownColumn", what, hint)
            return
        data_type = schema.field(column).type
        if not is_sortable(data_type):
            what = f"rows cannot be ordered by {column}, a {type_to_ddl(data_type)}"
            yield Problem(f"{path}.orderBy", "InvalidValue", what, "name a column without ARRAY")
        is_time = data_type in (Scalar.TIMESTAMP, Scalar.DATE)
        timed = event_time is not None or is_time
        if self.speedup is not None and not timed:
            what = f"speedup needs a column of times, and {column} is no TIMESTAMP or DATE"
            yield Problem(f"{path}.speedup", "NoEventTime", what, "set eventTime")


class FilesSinkSpec(SinkOptions):
    connector: ClassVar[str | None] = "files_sink:open_sink"

    url: str
    """Directory of the files, for this query alone; same schemes as `spec.checkpoint.store`."""
    format: Literal["parquet", "json"] = "parquet"
    """Format of the files; `json` has one object on each line."""

    @property
    def output_url(self) -> str:
        return self.url

    @property
    def format_of_files(self) -> str:
        return self.format
