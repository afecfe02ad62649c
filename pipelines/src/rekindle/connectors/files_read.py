"""Reads CSV, Parquet and JSON-lines files as batches of a declared schema.

The schema is what the topology declares; a file that lacks a column, or holds a value that is not
of its type, is an error that names file, column and row: a silent NULL would be a wrong result.
Errors of file systems, decompressors and decoders are raised as SourceFailed.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rekindle.connectors.compression import DECOMPRESSION_ERRORS, open_decompressed
from rekindle.connectors.conversions import TextRules, convert_to_field
from rekindle.connectors.csv_reading import read_csv, require_columns
from rekindle.connectors.json_reading import read_json_lines
from rekindle.connectors.line_blocks import BLOCK_BYTES
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle.topology.kinds.files import FilesSourceSpec
from rekindle.topology.problems import did_you_mean

BATCH_BYTES = 16 * 1024**2
BATCH_ROWS = 65_536
_BUFFER_BYTES = 256 << 10
_DICTIONARY_ROWS = 64
"""How many rows are read to get the dictionary of a column, which any batch contains as a whole."""
_TOO_LARGE = ("overflow", "capacity", "not implemented for chunked")
"""In errors of Arrow about a column of more than 2 GiB."""
_PARSER_ERRORS = (ValueError, csv.Error, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One input file; `identity` changes when its content does (size, time or ETag). `name` is its
    path relative to the URL's directory, or from the first wildcard on; so it does not change when
    the input is moved."""

    path: str
    identity: str
    name: str


@dataclass(frozen=True, slots=True)
class RowGroupSelection:
    """The row groups of a Parquet file whose number is `first` plus a multiple of `step`; with
    `inverse`, all others. A file of another format counts as one row group, number 0."""

    first: int
    step: int
    inverse: bool = False

    def __contains__(self, number: int) -> bool:
        return (number % self.step == self.first) != self.inverse

    def others(self) -> RowGroupSelection:
        return RowGroupSelection(self.first, self.step, not self.inverse)


ALL_ROW_GROUPS = RowGroupSelection(0, 1)

NumberedBatches = Iterator[tuple[int, pa.RecordBatch]]
"""Batches, each with the number of its first row in the file; the first row is number 0."""


def find_files(url: str, source: str) -> tuple[Any, list[FoundFile]]:
    """The file system and the files of a URL (a file, a directory or a glob), sorted by path."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
        fs.invalidate_cache()  # a listing from before may be out of date
        paths = _expand(fs, path)
        depth = _depth(fs, path)
        found = [
            FoundFile(p, _identity(fs.info(p)), "/".join(p.split("/")[depth:]))
            for p in sorted(paths)
        ]
    except Exception as e:  # errors of botocore and aiohttp are not OSErrors
        raise SourceFailed(
            f"source {source}: {url} cannot be read: {_message(e)}; check the URL, and that its "
            "store can be reached"
        ) from e
    if not found:
        raise SourceFailed(
            f"source {source}: no file at {url}; check the path, and that the volume is mounted"
        )
    return fs, found


def _expand(fs: Any, path: str) -> list[str]:
    """The files of a path. Those that are hidden, or in a hidden directory, below the part without
    wildcards are left out, because writers keep unfinished files there; not if the path itself
    names hidden ones."""
    parts = path.rstrip("/").split("/")
    depth = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if depth is not None:
        names_hidden = any(_is_hidden(part) for part in parts[depth:])
        files = [str(p) for p in fs.glob(path) if fs.isfile(p)]
        return files if names_hidden else [p for p in files if not _hidden_below(p, depth)]
    if fs.isdir(path):
        return [p for p in map(str, fs.find(path)) if not _hidden_below(p, len(parts))]
    return [path] if fs.exists(path) else []


def _depth(fs: Any, path: str) -> int:
    """Number of leading parts of a file's path that do not belong to its name."""
    parts = path.rstrip("/").split("/")
    wildcard = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if wildcard is not None:
        return wildcard
    return len(parts) if fs.isdir(path) else len(parts) - 1


def _hidden_below(path: str, depth: int) -> bool:
    return any(_is_hidden(part) for part in path.split("/")[depth:])


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _identity(info: dict[str, Any]) -> str:
    stamp = next((info[k] for k in ("ETag", "etag", "mtime", "LastModified") if k in info), "")
    return f"{info.get('size')}/{stamp}"


def read_batches(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    source: str,
    groups: RowGroupSelection = ALL_ROW_GROUPS,
    first_row: int = 0,
) -> NumberedBatches:
    """The rows of one file that are in `groups`, in file order, with exactly `schema`. If the file
    is Parquet, the first `first_row` of these rows are left out; other formats ignore `first_row`.
    Raises SourceFailed."""
    where = f"source {source}: {path}"
    with source_errors(where):
        yield from _batches(fs, path, options, schema, where, groups, first_row)


@contextlib.contextmanager
def source_errors(where: str) -> Iterator[None]:
    """Raises errors of reading a file as SourceFailed or SchemaMismatch."""
    try:
        yield
    except SourceFailed:
        raise
    except UnicodeDecodeError as e:
        raise SourceFailed(f"{where}: some text is not UTF-8; write the file in UTF-8") from e
    except DECOMPRESSION_ERRORS as e:
        raise SourceFailed(
            f"{where}: {_message(e)}; the file is damaged or incomplete: copy it again"
        ) from e
    except _PARSER_ERRORS as e:
        raise SchemaMismatch(f"{where}: {_message(e)}; correct the file or the schema") from e
    except Exception as e:  # errors of botocore and aiohttp are not OSErrors
        raise SourceFailed(
            f"{where} cannot be read: {_message(e)}; check that its store can be reached, and that "
            "the file is complete"
        ) from e


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


def _batches(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    where: str,
    groups: RowGroupSelection,
    first_row: int,
) -> NumberedBatches:
    if options.format != "parquet" and 0 not in groups:
        return
    match options.format:
        case "csv":
            raw = numbered(read_csv(fs, path, options, schema, where))
        case "json":
            raw = numbered(_json_batches(fs, path, schema, where))
        case "parquet":
            raw = _parquet_batches(fs, path, schema, where, groups, first_row)
        case other:
            assert_never(other)
    yield from converted(raw, schema, where, text_rules(options))


def text_rules(options: FilesSourceSpec) -> TextRules:
    return TextRules(binary_is_base64=options.format == "json")


def numbered(batches: Iterator[pa.RecordBatch]) -> NumberedBatches:
    row = 0
    for batch in batches:
        yield row, batch
        row += batch.num_rows


def converted(
    raw: NumberedBatches, schema: pa.Schema, where: str, rules: TextRules
) -> NumberedBatches:
    """The batches with the columns and types of `schema`."""
    for row, batch in raw:
        columns = [
            convert_to_field(batch.column(i), field, f"{where}: column {field.name}", row, rules)
            for i, field in enumerate(schema)
        ]
        yield row, pa.RecordBatch.from_arrays(columns, schema=schema)


def decode_json(data: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """JSON lines as the source reads them. Raises SchemaMismatch."""
    raw = read_json_lines(lambda: io.BytesIO(data), schema, BLOCK_BYTES, "JSON lines")
    batches = converted(numbered(raw), schema, "JSON lines", TextRules(binary_is_base64=True))
    return (batch for _, batch in batches)


def _json_batches(fs: Any, path: str, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    opened = partial(open_decompressed, fs, path, where)
    yield from read_json_lines(opened, schema, BLOCK_BYTES, where)


def _parquet_batches(
    fs: Any, path: str, schema: pa.Schema, where: str, groups: RowGroupSelection, to_skip: int
) -> NumberedBatches:
    with fs.open(path, "rb") as f:
        file = _opened_parquet(f, where)
        require_columns(file.schema_arrow.names, schema, where)
        _require_fields(file.schema_arrow, schema, where)
        row = 0
        fine = _columns_of_int96(file, schema.names)
        for group in range(file.num_row_groups):
            in_group = file.metadata.row_group(group).num_rows
            first, row = row, row + in_group
            if group not in groups:
                continue
            if to_skip >= in_group:
                to_skip -= in_group
                continue
            with _row_group_errors(where, file, group):
                rows = _rows_of_a_batch(f, file, group, schema.names)
                exact = _by_nanoseconds(f, file, group, fine, rows)
                for batch in file.iter_batches(rows, columns=schema.names, row_groups=[group]):
                    _require_sound(batch, next(exact, None), first, where)
                    if to_skip < batch.num_rows:
                        yield first + to_skip, batch.select(schema.names).slice(to_skip)
                    to_skip = max(0, to_skip - batch.num_rows)
                    first += batch.num_rows


def _columns_of_int96(file: pq.ParquetFile, names: list[str]) -> list[str]:
    leaves = (file.schema.column(n) for n in range(len(file.schema)))
    found = (leaf.path.partition(".")[0] for leaf in leaves if leaf.physical_type == "INT96")
    return [name for name in dict.fromkeys(found) if name in names]


def _by_nanoseconds(
    raw_file: Any, file: pq.ParquetFile, group: int, columns: list[str], rows: int
) -> Iterator[pa.RecordBatch]:
    """The columns of INT96 with all their digits, modulo 2^64 nanoseconds."""
    if not columns:
        return iter(())
    reader = pq.ParquetFile(raw_file, metadata=file.metadata)
    found: Iterator[pa.RecordBatch] = reader.iter_batches(rows, columns=columns, row_groups=[group])
    return found


def _require_sound(
    batch: pa.RecordBatch, exact: pa.RecordBatch | None, row: int, where: str
) -> None:
    """Check what Arrow's reader does not: that text is UTF-8, and that no time of INT96 is finer
    than a microsecond. `row`: the number of the first one."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as e:
            rows = range(1, len(column) + 1)
            valid = bisect.bisect_left(
                rows, True, key=lambda count: not _is_valid(column.take(pa.array(range(count))))
            )
            what = f"{where}: column {name}, row {row + valid + 1}: {e}; correct the file"
            raise SchemaMismatch(what) from e
    if exact is None:
        return
    for name in exact.schema.names:
        at = _first_finer(batch.column(name), exact.column(name))
        if at is not None:
            raise SchemaMismatch(
                f"{where}: column {name}, row {row + at + 1}: {exact.column(name)[at]} has "
                "nanoseconds, which a TIMESTAMP has not; write it with microseconds"
            )


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _first_finer(micros: pa.Array, nanos: pa.Array) -> int | None:
    """The first row with a time that is no whole microsecond."""
    types = pa.types
    if types.is_timestamp(micros.type):
        whole = pc.fill_null(micros.cast(pa.int64()), 0).to_numpy().astype(np.uint64)
        all_digits = pc.fill_null(nanos.cast(pa.int64()), 0).to_numpy().astype(np.uint64)
        found = np.flatnonzero(all_digits != whole * np.uint64(1000))
        return int(found[0]) if len(found) else None
    if types.is_struct(micros.type):
        pairs = zip(micros.flatten(), nanos.flatten(), strict=True)
        rows = [row for pair in pairs if (row := _first_finer(*pair)) is not None]
        return min(rows, default=None)
    if hasattr(micros, "values") and _first_finer(micros.flatten(), nanos.flatten()) is not None:
        one_by_one = ((micros.slice(at, 1), nanos.slice(at, 1)) for at in range(len(micros)))
        found_in = (_first_finer(m.flatten(), n.flatten()) for m, n in one_by_one)
        return next((at for at, inner in enumerate(found_in) if inner is not None), None)
    return None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """`bytes`: compressed size of the columns that are read; a reader holds them in memory."""

    rows: int
    bytes: int


def row_groups(fs: Any, path: str, columns: list[str], source: str) -> list[RowGroup]:
    """The row groups of a Parquet file. Raises SourceFailed."""
    where = f"source {source}: {path}"
    with source_errors(where), fs.open(path, "rb") as f:
        metadata = _opened_parquet(f, where).metadata
        groups = (metadata.row_group(n) for n in range(metadata.num_row_groups))
        return [RowGroup(g.num_rows, _compressed_bytes(g, set(columns))) for g in groups]


def _compressed_bytes(group: pq.RowGroupMetaData, columns: set[str]) -> int:
    chunks = (group.column(n) for n in range(group.num_columns))
    return sum(
        chunk.total_compressed_size
        for chunk in chunks
        if chunk.path_in_schema.partition(".")[0] in columns
    )


def _opened_parquet(file: Any, where: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(
            file,
            coerce_int96_timestamp_unit="us",  # holds all of INT96's times; `_require_sound`
            page_checksum_verification=True,
        )
    except pa.ArrowInvalid as e:
        raise SchemaMismatch(
            f"{where}: is not a complete Parquet file; correct the source's format, or copy the "
            "file again"
        ) from e


def _rows_of_a_batch(raw_file: Any, file: pq.ParquetFile, group: int, columns: list[str]) -> int:
    """Rows for each batch, within BATCH_ROWS and BATCH_BYTES."""
    found = file.metadata.row_group(group)
    bytes_of_row = max(1, found.total_byte_size // max(1, found.num_rows))
    rows: int = max(1, min(BATCH_ROWS, BATCH_BYTES // bytes_of_row))
    repeated = _bytes_of_repeated_values(raw_file, file, group, columns, rows)
    return max(1, min(rows, BATCH_BYTES // max(1, repeated)))


def _bytes_of_repeated_values(
    raw_file: Any, file: pq.ParquetFile, group: int, columns: list[str], rows: int
) -> int:
    """An upper bound of the bytes of the dictionary-encoded strings of one row. The sizes in the
    metadata do not show it: the file has each value of a dictionary once, however often it occurs.
    Columns that cannot exceed BATCH_BYTES in `rows` rows are left out."""
    found = file.metadata.row_group(group)
    chunks = {
        chunk.path_in_schema: -(-chunk.num_values // max(1, found.num_rows))
        for chunk in (found.column(n) for n in range(found.num_columns))
        if chunk.path_in_schema.partition(".")[0] in columns
        and chunk.physical_type == "BYTE_ARRAY"
        and any("DICTIONARY" in encoding for encoding in chunk.encodings)
        and rows * chunk.total_uncompressed_size > BATCH_BYTES
    }
    if not chunks:
        return 0
    paths = list(chunks)
    reader = pq.ParquetFile(  # with a buffer it does not read all of a column
        raw_file, metadata=file.metadata, read_dictionary=paths, buffer_size=_BUFFER_BYTES
    )
    size = 0
    for path, values_of_row in chunks.items():
        batches = reader.iter_batches(_DICTIONARY_ROWS, columns=[path], row_groups=[group])
        size += _longest(next(batches).column(0)) * values_of_row
    return size


def _longest(array: pa.Array) -> int:
    """Bytes of the longest value of the dictionaries in an array."""
    data_type, types = array.type, pa.types
    if types.is_dictionary(data_type):
        return int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)
    if types.is_struct(data_type):
        return max((_longest(array.field(n)) for n in range(data_type.num_fields)), default=0)
    return _longest(array.values) if hasattr(array, "values") else 0


@contextlib.contextmanager
def _row_group_errors(where: str, file: pq.ParquetFile, group: int) -> Iterator[None]:
    """Adds the row group and its size to errors of Arrow, and what to do."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as e:
        if isinstance(e, OSError) and (type(e) is not OSError or e.errno is not None):
            raise  # of the store; Arrow's own have no number
        is_too_large = isinstance(e, MemoryError) or any(word in str(e) for word in _TOO_LARGE)
        found = file.metadata.row_group(group)
        advice = (
            "a column of one batch holds at most 2 GiB and has to fit into memory: write the file "
            "with smaller row groups"
            if is_too_large
            else "the file is damaged, or has a type that Arrow cannot read: write it again"
        )
        raise SchemaMismatch(
            f"{where}: row group {group} ({found.num_rows:,} rows, "
            f"{found.total_byte_size / 2**20:,.0f} MiB): {_message(e)}; {advice}"
        ) from e


def _require_fields(found: pa.Schema, schema: pa.Schema, where: str) -> None:
    """Check that all nested fields of structs exist: a missing one would be NULL in every row."""
    for field in schema:
        _require_inner(found.field(field.name).type, field.type, field.name, where)


def _require_inner(found: pa.DataType, wanted: pa.DataType, path: str, where: str) -> None:
    types = pa.types
    if types.is_list(wanted) and hasattr(found, "value_type"):
        _require_inner(found.value_type, wanted.value_type, path, where)
    if not (types.is_struct(wanted) and types.is_struct(found)):
        return
    names = [f.name for f in found]
    for field in wanted:
        if names.count(field.name) != 1:
            what = "more than one" if field.name in names else "no"
            listed = ", ".join(f"{path}.{name}" for name in names) or "no fields"
            raise SchemaMismatch(
                f"{where}: {what} field {path}.{field.name}; the file has {listed}: name its "
                f"fields in the source's schema{_hint(field.name, names)}"
            )
        inner = found.field(found.get_field_index(field.name)).type
        _require_inner(inner, field.type, f"{path}.{field.name}", where)


def _hint(name: str, names: list[str]) -> str:
    hint = did_you_mean(name, names)
    return f" ({hint})" if hint else ""
