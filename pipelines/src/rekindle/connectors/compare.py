"""Compares the outputs of two executions: the oracle of the demo and of every failure test.

Files are compared by (query, partition, epoch), row by row in order. A row that is only in the
expected file is lost, one that is only in the actual file is repeated; a lost and a repeated row at
the same position count as one differing row.

Design: docs/design/exactly-once.md#proof.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.connectors.files_read import decode_json
from rekindle.connectors.files_sink import MARKER, SUFFIX, parse_name
from rekindle.connectors.json_lines import json_line, parse_lines, parse_objects
from rekindle.objects import Objects, open_objects
from rekindle.topology.spec import QuerySpec

FileKey = tuple[str, int, int]  # query, partition, epoch

MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """How an actual output differs from the expected one; `not difference` means it does not.

    `lost`, `repeated`, `differing` count rows; `examples` describe the first few.
    """

    expected_rows: int
    actual_rows: int
    lost: int = 0
    repeated: int = 0
    differing: int = 0
    files: tuple[FileKey, ...] = ()
    examples: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.differing or self.files)

    def __str__(self) -> str:
        if not self:
            return f"identical: {self.actual_rows} rows"
        head = (
            f"{self.lost} rows lost, {self.repeated} repeated, {self.differing} differing in "
            f"{len(self.files)} files (expected {self.expected_rows} rows, got {self.actual_rows})"
        )
        return "\n".join((head, *(f"  {e}" for e in self.examples)))


def read_sink(
    sink: QuerySpec | str,
    format: str | None = None,
    *,
    until_epoch: int | None = None,
    schema: pa.Schema | None = None,
) -> pa.Table:
    """All rows of a `files` sink, by (query, partition, epoch), with these as first columns.

    `sink` is the query or its sink's URL (then `format` is "parquet" or "json"). From JSON, times
    are strings unless `schema` gives all columns and their types.
    """
    url, format, query = _url_and_format(sink, format)
    objects = open_objects(url)
    tables = []
    for key, name in _files(objects, format, query, 0, until_epoch):
        rows = _table(objects.get(name), format, schema)
        key_columns = {
            "_query": pa.array([key[0]] * rows.num_rows, pa.string()),
            "_partition": pa.array([key[1]] * rows.num_rows, pa.int32()),
            "_epoch": pa.array([key[2]] * rows.num_rows, pa.int64()),
        }
        tables.append(pa.table({**key_columns, **{n: rows.column(n) for n in rows.column_names}}))
    if not tables:
        return pa.table({"_query": [], "_partition": [], "_epoch": []})
    return pa.concat_tables(tables, promote_options="permissive")


def compare_sinks(
    expected: QuerySpec | str,
    actual: QuerySpec | str,
    format: str | None = None,
    *,
    since_epoch: int = 0,
    until_epoch: int | None = None,
) -> Difference:
    """Compare two sinks row by row, only from `since_epoch` (for a query that was added later)
    through `until_epoch` (for a run that is still going on). Raises ValueError if there is no
    expected output at all."""
    expected_url = _url_and_format(expected, format)[0]
    if not open_objects(expected_url).exists(MARKER):
        raise ValueError(f"{expected_url} has no Rekindle output to compare with")
    expected_files = _lines(expected, format, since_epoch, until_epoch)
    actual_files = _lines(actual, format, since_epoch, until_epoch)
    lost = differing = 0
    repeated = 0
    files: list[FileKey] = []
    examples: list[str] = []
    expected_counts = Counter(line for lines in expected_files.values() for line in lines)
    for key in sorted(expected_files.keys() | actual_files.keys()):
        expected_lines, actual_lines = expected_files.get(key, []), actual_files.get(key, [])
        if expected_lines == actual_lines:
            continue
        files.append(key)
        missing = Counter(expected_lines) - Counter(actual_lines)
        extra = Counter(actual_lines) - Counter(expected_lines)
        changed = _changed(expected_lines, actual_lines) if missing and extra else 0
        moved = 0
        if not missing and not extra:
            moved = sum(a != b for a, b in zip(expected_lines, actual_lines, strict=True))
        lost += missing.total() - changed
        repeated += extra.total() - changed
        differing += changed + moved
        examples += _examples(key, missing, extra, expected_counts, moved)
    return Difference(
        expected_rows=sum(map(len, expected_files.values())),
        actual_rows=sum(map(len, actual_files.values())),
        lost=lost,
        repeated=repeated,
        differing=differing,
        files=tuple(files),
        examples=tuple(examples[:MAX_EXAMPLES]),
    )


def _changed(expected_lines: list[str], actual_lines: list[str]) -> int:
    """Positions at which both files have a row, and the rows are in one file only."""
    only_expected = set(expected_lines) - set(actual_lines)
    only_actual = set(actual_lines) - set(expected_lines)
    pairs = zip(expected_lines, actual_lines, strict=False)
    return sum(a in only_expected and b in only_actual for a, b in pairs)


def _examples(
    key: FileKey,
    missing: Counter[str],
    extra: Counter[str],
    expected_counts: Counter[str],
    moved: int,
) -> list[str]:
    where = f"{key[0]} partition {key[1]} epoch {key[2]}"
    found = [f"{where}: expected {line}" for line in list(missing)[:MAX_EXAMPLES]]
    found += [
        f"{where}: {'again' if expected_counts[line] else 'unexpected'} {line}"
        for line in list(extra)[:MAX_EXAMPLES]
    ]
    return found or [f"{where}: {moved} rows in a different order"]


def _url_and_format(sink: QuerySpec | str, format: str | None) -> tuple[str, str, str | None]:
    if isinstance(sink, str):
        return sink, _format_at(sink) if format is None else format, None
    if sink.sink.files is None:
        raise ValueError(f"query {sink.name} has no files sink to read")
    return sink.sink.files.url, sink.sink.files.format, sink.name


def _format_at(url: str) -> str:
    names = [i.name for i in open_objects(url).list() if parse_name(i.name)]
    return "json" if any(n.endswith(SUFFIX["json"]) for n in names) else "parquet"


def _files(
    objects: Objects, format: str, query: str | None, since_epoch: int, until_epoch: int | None
) -> list[tuple[FileKey, str]]:
    keyed = []
    for info in objects.list():
        key = parse_name(info.name)
        if key is None or not info.name.endswith(SUFFIX[format]):
            continue
        if query not in (None, key[0]) or key[2] < since_epoch:
            continue
        if until_epoch is not None and key[2] > until_epoch:
            continue
        keyed.append((key, info.name))
    return sorted(keyed)


def _table(data: bytes, format: str, schema: pa.Schema | None) -> pa.Table:
    if format == "parquet":
        return pq.read_table(io.BytesIO(data))
    if schema is not None:
        return pa.Table.from_batches(decode_json(data, schema), schema)
    return pa.Table.from_struct_array(pa.array(parse_objects(data)))


def _lines(
    sink: QuerySpec | str, format: str | None, since_epoch: int, until_epoch: int | None
) -> Mapping[FileKey, list[str]]:
    """The rows of every file in a normal form: equal rows are equal strings."""
    url, format, query = _url_and_format(sink, format)
    objects = open_objects(url)
    return {
        key: _rows_as_lines(objects.get(name), format)
        for key, name in _files(objects, format, query, since_epoch, until_epoch)
    }


def _rows_as_lines(data: bytes, format: str) -> list[str]:
    if format == "parquet":
        rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
        return [json_line(row) for row in rows]
    return parse_lines(data)
