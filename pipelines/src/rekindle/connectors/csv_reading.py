"""Reads CSV files as batches of string columns, one for each column of a schema.

Options are named as in Spark's CSV source. With `header`, columns are found by name, without it by
position. A quote inside a quoted value is doubled, or preceded by `escape`; after `escape` the next
character is taken literally, inside and outside of quotes. A quote as `escape` means that quotes
are doubled, which is always possible.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv

from rekindle.connectors.compression import open_decompressed
from rekindle.connectors.csv_quotes import (
    CsvDialect,
    QuoteDetector,
    each_line_is_a_row,
    require_closed_quotes,
    without_csv_field_limit,
)
from rekindle.connectors.line_blocks import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    NotReadableInBlocks,
    blocks_of_lines,
)
from rekindle.errors import SchemaMismatch
from rekindle.topology.kinds.files import UTF_8, FilesSourceSpec
from rekindle.topology.problems import did_you_mean

_BOM = "\ufeff"
_SHOWN_CHARS = 120
_MAX_FIRST_LINE_CHARS = 4 * BLOCK_BYTES
"""Arrow reads no row that is longer than a block. Without a bound, a file without a line end would
be read into memory as a whole."""


class CsvOptions(Protocol):
    """The fields of a source that say how its values are separated, quoted, escaped and NULL."""

    @property
    def delimiter(self) -> str: ...
    @property
    def quote(self) -> str: ...
    @property
    def escape(self) -> str | None: ...
    @property
    def null_value(self) -> str: ...


def read_csv(
    fs: Any, path: str, options: FilesSourceSpec, schema: pa.Schema, where: str
) -> Iterator[pa.RecordBatch]:
    """The rows of one file. `where`: its source and path, for messages. Raises SchemaMismatch, and
    what the file raises."""
    try:
        yield from _read(fs, path, options, schema, where)
    except UnicodeError as e:
        raise _encoding_error(options, where) from e


def _read(
    fs: Any, path: str, options: FilesSourceSpec, schema: pa.Schema, where: str
) -> Iterator[pa.RecordBatch]:
    dialect = dialect_of(options)
    first = _read_first_row(fs, path, options, dialect, schema, where)
    if first is None:
        return
    names = None if options.header else schema.names
    has_generated_names = options.header and not set(schema.names) <= set(first.values)
    if has_generated_names:
        names = first.names
    invalid_rows: list[pa_csv.InvalidRow] = []
    read = pa_csv.ReadOptions(
        block_size=BLOCK_BYTES,
        column_names=names,
        skip_rows_after_names=first.empty_lines + 1 if has_generated_names else 0,
        encoding=options.encoding,
    )
    with open_decompressed(fs, path, where) as f:
        detector = QuoteDetector(f, dialect, ascii_compatible=options.encoding == UTF_8)
        try:
            yield from pa_csv.open_csv(
                detector,
                read_options=read,
                parse_options=_parse_options(dialect, invalid_rows),
                convert_options=_convert_options(options, schema),
            )
        except pa.ArrowInvalid as e:
            raise _schema_mismatch(e, invalid_rows, options, where) from e
    if detector.needs_check:
        # As latin-1, because columns that are not read may hold invalid UTF-8.
        encoding = "latin-1" if options.encoding == UTF_8 else options.encoding
        with _open_text(fs, path, encoding, where) as lines:
            require_closed_quotes(lines, where, dialect)


def read_csv_blocks(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    where: str,
    block_bytes: int,
    max_line_bytes: int,
) -> tuple[list[str], Iterator[tuple[int, bytes, pa.RecordBatch]]]:
    """(names of the values of a row, batches). The batches are those of `read_csv`, each with the
    offset and the bytes of its lines. Raises NotReadableInBlocks if a row cannot be read, or if a
    line may not be a row: because of line ends in quotes, escapes, line ends other than \\n and
    \\r\\n, another encoding than UTF-8, or more than `max_line_bytes`."""
    dialect = dialect_of(options)
    if options.encoding != UTF_8:
        raise NotReadableInBlocks(f"{where}: the encoding is {options.encoding}")
    try:
        first = _read_first_row(fs, path, options, dialect, schema, where)
    except UnicodeError as e:
        raise _encoding_error(options, where) from e
    if first is None:
        return [], iter(())
    names = first.names if options.header else schema.names

    def blocks() -> Iterator[tuple[int, bytes, pa.RecordBatch]]:
        header_lines = first.empty_lines + 1 if options.header else 0
        with fs.open(path, "rb") as file:
            for offset, lines in blocks_of_lines(file, block_bytes, max_line_bytes):
                _require_row_per_line(lines, dialect, where)
                start = _end_of_lines(lines, header_lines, where)
                header_lines = 0
                block = lines[start:]
                yield offset + start, block, parse_csv_block(block, options, schema, names, where)

    return names, blocks()


def _require_row_per_line(lines: bytes, dialect: CsvDialect, where: str) -> None:
    """Check that each line is a row."""
    if dialect.escape is not None and dialect.escape.encode() in lines:
        raise NotReadableInBlocks(f"{where}: {dialect.escape} may be before a line end")
    if lines.count(b"\r") != lines.count(b"\r\n"):
        raise NotReadableInBlocks(f"{where}: a line ends with a carriage return")
    if lines.startswith(BYTE_ORDER_MARK):
        raise NotReadableInBlocks(f"{where}: a second byte order mark")
    if not each_line_is_a_row(lines, dialect):
        raise NotReadableInBlocks(f"{where}: a quoted value contains a line end, or is not closed")


def _end_of_lines(data: bytes, count: int, where: str) -> int:
    """The offset after the first `count` lines."""
    at = 0
    for _ in range(count):
        at = data.find(b"\n", at) + 1
        if not at:
            raise NotReadableInBlocks(f"{where}: the header is not in the first block")
    return at


def parse_csv_block(
    block: bytes, options: CsvOptions, schema: pa.Schema, names: list[str], where: str
) -> pa.RecordBatch:
    """The rows of a block of whole lines. `names`: the names of the values of a row."""
    strings = pa.schema([(name, pa.string()) for name in schema.names])
    if not block.strip(b"\r\n"):
        return pa.RecordBatch.from_pylist([], strings)
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(block),
            read_options=pa_csv.ReadOptions(
                use_threads=False, block_size=len(block) + 1, column_names=names
            ),
            parse_options=_parse_options(dialect_of(options), []),
            convert_options=_convert_options(options, schema),
        )
    except pa.ArrowInvalid as e:
        raise NotReadableInBlocks(f"{where}: {e}") from e
    (batch,) = table.combine_chunks().to_batches()
    return batch


def dialect_of(options: CsvOptions) -> CsvDialect:
    escape = None if options.escape == options.quote else options.escape
    return CsvDialect(options.delimiter, options.quote or None, escape)


def _convert_options(options: CsvOptions, schema: pa.Schema) -> pa_csv.ConvertOptions:
    return pa_csv.ConvertOptions(
        include_columns=schema.names,
        column_types={name: pa.string() for name in schema.names},
        null_values=[options.null_value],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


def _parse_options(
    dialect: CsvDialect, invalid_rows: list[pa_csv.InvalidRow]
) -> pa_csv.ParseOptions:
    """Rows with another number of values are added to `invalid_rows`, and are an error."""

    def refuse(row: pa_csv.InvalidRow) -> str:
        invalid_rows.append(row)
        return "error"

    return pa_csv.ParseOptions(
        delimiter=dialect.delimiter,
        quote_char=dialect.quote or False,
        escape_char=dialect.escape or False,
        newlines_in_values=True,
        invalid_row_handler=refuse,
    )


@dataclass(frozen=True, slots=True)
class _FirstRow:
    values: list[str]
    empty_lines: int
    """Number of empty lines before the row."""

    @property
    def names(self) -> list[str]:
        """Column names, if the row is a header; like in Spark, a column without a name is `_c0`."""
        taken = set(self.values)
        numbers = (f"_c{i}" for i in range(len(self.values)))
        return [
            value or ("" if number in taken else number)
            for value, number in zip(self.values, numbers, strict=True)
        ]


def _read_first_row(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    dialect: CsvDialect,
    schema: pa.Schema,
    where: str,
) -> _FirstRow | None:
    """The first row, checked; None if the file has no row. Raises SchemaMismatch."""
    encoding = "utf-8-sig" if options.encoding == UTF_8 else options.encoding
    with (
        _open_text(fs, path, encoding, where) as f,
        nullcontext() if options.header else without_csv_field_limit(),  # column names are short
    ):
        lines = _without_bom(_bounded_lines(f, where))
        # Arrow skips empty lines, and fails for a header without a line end.
        rows = enumerate(dialect.reader(lines))
        first = next((_FirstRow(row, number) for number, row in rows if row), None)
        is_last = next(lines, None) is None
    if options.header:
        if first is None:
            raise SchemaMismatch(
                f"{where}: the file is empty; its first line has to name the columns (or write "
                "header: false)"
            )
        require_columns(first.names, schema, where, _delimiter_hint(first.values, dialect))
        return None if is_last else first
    if first is not None and len(first.values) != len(schema):
        raise SchemaMismatch(
            f"{where}: the first row has {len(first.values)} values, and the schema {len(schema)} "
            f"columns: with header: false the schema has a column for each value, in the order "
            f"of the file{_delimiter_hint(first.values, dialect)}"
        )
    return first


@contextmanager
def _open_text(fs: Any, path: str, encoding: str, where: str) -> Iterator[io.TextIOWrapper]:
    with (
        open_decompressed(fs, path, where) as file,
        io.TextIOWrapper(file, encoding, newline="") as text,
    ):
        yield text


def _bounded_lines(file: Any, where: str) -> Iterator[str]:
    while line := file.readline(_MAX_FIRST_LINE_CHARS):
        if len(line) == _MAX_FIRST_LINE_CHARS:
            raise SchemaMismatch(
                f"{where}: a line at the beginning has more than {_MAX_FIRST_LINE_CHARS:,} "
                "characters; check that the file is CSV, and complete"
            )
        yield line


def _without_bom(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(_BOM)


def _delimiter_hint(first: list[str], dialect: CsvDialect) -> str:
    """The hint for a file that has one column."""
    found = [other for other in ";,|\t" if other != dialect.delimiter and other in first[0]]
    if len(first) > 1 or not found:
        return ""
    shown = r"\t" if found[0] == "\t" else found[0]
    return f'; if the file has another delimiter, set delimiter: "{shown}"'


def require_columns(names: list[str], schema: pa.Schema, where: str, hint: str = "") -> None:
    """Check that each column of the schema occurs exactly once. Raises SchemaMismatch."""
    missing = [n for n in schema.names if n not in names]
    if missing:
        near = did_you_mean(missing[0], names)
        raise SchemaMismatch(
            f"{where}: no column {', '.join(missing)}; the file has {', '.join(names)}: name its "
            f"columns in the source's schema{f' ({near})' if near else ''}{hint}"
        )
    twice = [n for n in schema.names if names.count(n) > 1]
    if twice:
        raise SchemaMismatch(
            f"{where}: column {', '.join(twice)} occurs more than once, so the schema's column is "
            "ambiguous; rename one in the file"
        )


def _schema_mismatch(
    error: pa.ArrowInvalid,
    invalid_rows: list[pa_csv.InvalidRow],
    options: FilesSourceSpec,
    where: str,
) -> SchemaMismatch:
    """Arrow's error in terms of the resource's options."""
    if invalid_rows:
        row = invalid_rows[0]
        return SchemaMismatch(
            f"{where}: a row has {row.actual_columns} values instead of {row.expected_columns}: "
            f"{row.text[:_SHOWN_CHARS]!r}; correct the file, or its delimiter, quote or escape"
        )
    if "UTF8" in str(error):
        return _encoding_error(options, where)
    return SchemaMismatch(f"{where}: {error}; correct the file or the schema")


def _encoding_error(options: FilesSourceSpec, where: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{where}: some text is not {options.encoding}; set the encoding of the file, such as "
        "encoding: ISO-8859-1"
    )
