"""Rows of csv, parquet and JSON-lines files as batches of a declared schema.

The schema is what the topology declares; a file that lacks a column, or holds a value that is not
of its type, is an error that names file, column and row: a silent NULL would be a wrong result.
Whatever a file system, a decompressor or a decoder raises becomes SourceFailed as well.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from rekindle.errors import SourceFailed, SourceMisfit

BLOCK_BYTES = 4 * 1024**2
_ZONED = r"(?i)(Z|[+-]\d{2}(:?\d{2})?)$"
_DATE_AND_TIME = r"^\s*\d{4}-\d{2}-\d{2}[T ]"
_PARSERS = (ValueError, csv.Error, pa.ArrowException)
_DECOMPRESSORS = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One input file; `identity` changes when its content does (size, time or ETag)."""

    path: str
    identity: str


def find_files(url: str, source: str) -> tuple[Any, list[FoundFile]]:
    """The file system and the files of a URL (a file, a directory or a glob), sorted by path."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
        fs.invalidate_cache()  # what is there now, not what a store listed before
        paths = _expand(fs, path)
        found = [FoundFile(p, _identity(fs.info(p))) for p in sorted(paths)]
    except Exception as e:  # botocore's and aiohttp's errors are no OSErrors
        raise SourceFailed(
            f"source {source}: {url} cannot be read: {_said(e)}; is its place within reach, and "
            "the URL right?"
        ) from e
    if not found:
        raise SourceFailed(
            f"source {source}: no file at {url}; is the volume mounted, and the path right?"
        )
    return fs, found


def _expand(fs: Any, path: str) -> list[str]:
    """The files of a path; below its fixed part none that is hidden or in a hidden directory, for
    that is where writers keep what is not finished."""
    parts = path.rstrip("/").split("/")
    depth = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if depth is not None:
        asked = any(_is_hidden(part) for part in parts[depth:])
        files = [str(p) for p in fs.glob(path) if fs.isfile(p)]
        return files if asked else [p for p in files if not _hidden_below(p, depth)]
    if fs.isdir(path):
        return [p for p in map(str, fs.find(path)) if not _hidden_below(p, len(parts))]
    return [path] if fs.exists(path) else []


def _hidden_below(path: str, depth: int) -> bool:
    return any(_is_hidden(part) for part in path.split("/")[depth:])


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _identity(info: dict[str, Any]) -> str:
    stamp = next((info[k] for k in ("ETag", "etag", "mtime", "LastModified") if k in info), "")
    return f"{info.get('size')}/{stamp}"


def read_batches(
    fs: Any, path: str, format: str, schema: pa.Schema, null_value: str, source: str
) -> Iterator[pa.RecordBatch]:
    """The rows of one file in file order, of exactly `schema`. Raises SourceFailed."""
    where = f"source {source}: {path}"
    with _reading(where):
        yield from _batches(fs, path, format, schema, null_value, where)


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except SourceFailed:
        raise
    except UnicodeDecodeError as e:
        raise SourceFailed(f"{where}: {e}; write the file in UTF-8") from e
    except _DECOMPRESSORS as e:
        raise SourceFailed(f"{where}: {_said(e)}; copy the file anew, and whole") from e
    except _PARSERS as e:
        raise SourceMisfit(f"{where}: {_said(e)}; correct the file or the schema") from e
    except Exception as e:  # botocore's and aiohttp's errors are no OSErrors
        raise SourceFailed(
            f"{where} cannot be read: {_said(e)}; is its place within reach, and the file whole?"
        ) from e


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _batches(
    fs: Any, path: str, format: str, schema: pa.Schema, null_value: str, where: str
) -> Iterator[pa.RecordBatch]:
    match format:
        case "csv":
            raw = _csv_batches(fs, path, schema, null_value, where)
        case "json":
            raw = _json_batches(fs, path, schema, where)
        case "parquet":
            raw = _parquet_batches(fs, path, schema, where)
        case _:
            raise SourceFailed(f"{where}: files of format {format!r} are not known")
    row = 0
    for batch in raw:
        columns = [
            _typed(batch.column(i), field, f"{where}: column {field.name}", row)
            for i, field in enumerate(schema)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
        row += batch.num_rows


def _csv_batches(
    fs: Any, path: str, schema: pa.Schema, null_value: str, where: str
) -> Iterator[pa.RecordBatch]:
    with fs.open(path, "rt", compression="infer", encoding="utf-8-sig", newline="") as f:
        header = next(csv.reader(f), None)
    if header is None:
        raise SourceMisfit(f"{where}: the file is empty; its first line has to name the columns")
    _require_columns(header, schema, where)
    convert = pa_csv.ConvertOptions(
        include_columns=schema.names,
        column_types={name: pa.string() for name in schema.names},
        null_values=[null_value],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    parse = pa_csv.ParseOptions(newlines_in_values=True)
    read = pa_csv.ReadOptions(block_size=BLOCK_BYTES)
    with fs.open(path, "rb", compression="infer") as f:
        yield from pa_csv.open_csv(
            f, read_options=read, parse_options=parse, convert_options=convert
        )


def _json_batches(fs: Any, path: str, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    raw = pa.schema([pa.field(f.name, _json_type(f.type)) for f in schema])
    parse = pa_json.ParseOptions(explicit_schema=raw, unexpected_field_behavior="ignore")
    read = pa_json.ReadOptions(block_size=BLOCK_BYTES)
    unseen = set(schema.names)
    try:
        with fs.open(path, "rb", compression="infer") as f:
            for batch in pa_json.open_json(f, read_options=read, parse_options=parse):
                unseen -= {n for n in unseen if batch.column(n).null_count < batch.num_rows}
                yield batch.select(schema.names)
    except pa.ArrowInvalid as e:
        line, value = _bad_json_line(fs, path, raw)
        at = f", line {line}: {value[:120]!r}" if line else ""
        raise SourceMisfit(f"{where}{at}: {e}; correct the file or the schema") from e
    if unseen:
        _require_fields(fs, path, sorted(unseen), where)


def _parquet_batches(fs: Any, path: str, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    with fs.open(path, "rb") as f:
        file = pq.ParquetFile(f)
        _require_columns(file.schema_arrow.names, schema, where)
        for batch in file.iter_batches(columns=schema.names):
            yield batch.select(schema.names)


def _require_columns(names: list[str], schema: pa.Schema, where: str) -> None:
    missing = [n for n in schema.names if n not in names]
    if missing:
        raise SourceMisfit(
            f"{where}: no column {', '.join(missing)}; the file has {', '.join(names)}: "
            "name its columns in the source's schema"
        )


def _require_fields(fs: Any, path: str, names: list[str], where: str) -> None:
    """Each field is in some row, be it as null: one that none has is a mistake in a name."""
    missing, others = set(names), set[str]()
    with fs.open(path, "rb", compression="infer") as f:
        for line in filter(bytes.strip, f):
            try:
                fields = json.loads(line)
            except ValueError:
                return  # Arrow has read it; what it holds is not known here
            missing -= fields.keys()
            others |= fields.keys()
            if not missing:
                return
    raise SourceMisfit(
        f"{where}: no row has a field {', '.join(sorted(missing))}; the file has "
        f"{', '.join(sorted(others))}: name its fields in the source's schema"
    )


def _json_type(kind: pa.DataType) -> pa.DataType:
    """What JSON can say of a type: times, decimals and binaries come as strings."""
    t = pa.types
    as_text = (
        t.is_temporal(kind) or t.is_decimal(kind) or t.is_binary(kind) or t.is_large_string(kind)
    )
    return pa.string() if as_text else kind


def _bad_json_line(fs: Any, path: str, schema: pa.Schema) -> tuple[int, str]:
    parse = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    with fs.open(path, "rb", compression="infer") as f:
        for number, line in enumerate(f, start=1):
            try:
                json.loads(line)
                pa_json.read_json(pa.BufferReader(line), parse_options=parse)
            except (pa.ArrowInvalid, ValueError, RecursionError):
                return number, line.decode(errors="replace").rstrip()
    return 0, ""


def _typed(column: pa.Array, field: pa.Field, where: str, first_row: int) -> pa.Array:
    """The column in its declared type, or an error naming the first value that does not fit."""
    if pa.types.is_string(column.type) and not pa.types.is_string(field.type):
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if column.type != field.type:
        convert = _converter(column.type, field.type)
        try:
            column = convert(column)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
            row = _first_bad(convert, column)
            raise SourceMisfit(
                f"{where}, row {first_row + row + 1}: {column[row].as_py()!r} is not a "
                f"{field.type}; correct the file, the schema, or nullValue"
            ) from e
    if column.null_count and not field.nullable:
        row = int(pc.index(column.is_null(), True).as_py())
        raise SourceMisfit(f"{where}, row {first_row + row + 1}: NULL in a NOT NULL column")
    return column


def _converter(source: pa.DataType, target: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    if pa.types.is_string(source) and pa.types.is_timestamp(target):
        return lambda column: _timestamps(column, target)
    if pa.types.is_timestamp(source) and pa.types.is_timestamp(target):
        return lambda column: _rezoned(column, target)
    return lambda column: pc.cast(column, target)


def _timestamps(column: pa.Array, target: pa.DataType) -> pa.Array:
    """ISO 8601 texts; one without a zone is UTC."""
    utc = pa.timestamp("us", "UTC")
    text = pc.utf8_trim_whitespace(column)
    zoned = pc.and_(
        pc.match_substring_regex(text, _DATE_AND_TIME), pc.match_substring_regex(text, _ZONED)
    )
    nothing = pa.scalar(None, pa.string())
    with_zone = pc.cast(pc.if_else(zoned, text, nothing), utc)
    without = pc.cast(pc.if_else(zoned, nothing, text), pa.timestamp("us"))
    return _rezoned(pc.coalesce(with_zone, pc.assume_timezone(without, "UTC")), target)


def _rezoned(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Between zoned and zoneless timestamps, whose zone is UTC."""
    if column.type.tz is None and target.tz is not None:
        column = pc.assume_timezone(column, "UTC")
    elif column.type.tz is not None and target.tz is None:
        column = pc.cast(column, pa.timestamp(column.type.unit, "UTC"))
        column = pc.local_timestamp(column)
    return pc.cast(column, target)


def _first_bad(convert: Callable[[pa.Array], pa.Array], column: pa.Array) -> int:
    """The index of the first value that does not convert, by halving."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(column.slice(low, middle - low))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            high = middle
        else:
            low = middle
    return low
