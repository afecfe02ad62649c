"""Preparing a partition of a `files` source: its rows, sorted once, and the index of its epochs.

Input that is in order is read in place if parts of it can be read alone (Parquet with small row
groups, plain text: `connectors.text_in_place`): only the index is written, and cuts read the input
files (`connectors.rows_in_place`). Otherwise the units of the partition (row groups of Parquet,
otherwise whole files) are read once, sorted (stable) by `orderBy` and written to the task's disk as
one Arrow file. The name of a prepared file contains a hash of spec, schema, and each input file's
size and time, so a changed input is prepared again. *Keys* are the columns that decide on order and
epochs, not those of `keyBy`.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rekindle.connectors.event_time import with_event_time
from rekindle.connectors.files_index import (
    NotInOrder,
    OrderCheck,
    OrderedInput,
    Unit,
    build_index,
    event_time_extent,
    order_input,
)
from rekindle.connectors.files_job import PreparationJob
from rekindle.connectors.files_read import (
    ALL_ROW_GROUPS,
    FoundFile,
    NumberedBatches,
    RowGroupSelection,
    find_files,
    read_batches,
    row_groups,
)
from rekindle.connectors.input_identity import encode_input_files, identify
from rekindle.connectors.line_blocks import Block
from rekindle.connectors.prepared import (
    IN_PLACE,
    MappedRows,
    open_memory_mapped,
    publish,
    reordered,
    with_checksum,
    write_rows,
)
from rekindle.connectors.rows_in_place import RowsInPlace, TextRowsInPlace
from rekindle.connectors.text_in_place import TextBlocks, read_blocks, scan_blocks
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle.objects import to_json

MAX_IN_PLACE_BYTES = 64 << 20
"""Limit of a (compressed) row group, or a line of text, for reading in place, since the reader
always holds one in memory. Input with a larger one is copied to disk."""
INPUT_KEY = b"rekindle.input"
"""In the metadata of the index: the input files."""
EVENT_TIME_RANGE_KEY = b"rekindle.extent"
"""In the metadata of the index: the first and last event time of all partitions, JSON."""


@dataclass(frozen=True, slots=True)
class FileSplit:
    """What a partition reads of one file: `rows` rows, of every `partitions`-th row group from
    `first_group` on, or of these blocks of a text."""

    first_group: int
    rows: int
    text: TextBlocks | None = None


def prepare(
    job: PreparationJob, fs: Any, found: list[FoundFile], rows_path: Path, index_path: Path
) -> None:
    """Write the index, and the rows unless they are read in place. The index is created last: if it
    exists, the rows are complete."""
    temporary = _TemporaryFiles(rows_path)
    try:
        table = _index_in_place(job, fs, found, temporary)
        if table is None:
            table = _copy(job, fs, found, rows_path, temporary)
        else:
            rows_path.unlink(missing_ok=True)
        final = temporary.path("index")
        write_rows(final, table.schema, [table.to_batches()])
        publish(final, index_path)
    finally:
        temporary.remove()


class _TemporaryFiles:
    """Files in the directory of the prepared rows, for what is not complete yet."""

    def __init__(self, rows: Path) -> None:
        self._rows = rows
        self._token = uuid.uuid4().hex
        self._paths: set[Path] = set()

    def path(self, name: str) -> Path:
        path = self._rows.with_name(f".{self._rows.name}.{self._token}.{name}")
        self._paths.add(path)
        return path

    def remove(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def _copy(
    job: PreparationJob,
    fs: Any,
    found: list[FoundFile],
    rows_path: Path,
    temporary: _TemporaryFiles,
) -> pa.Table:
    """Write temporary files with the partition's own rows, in file order, and with the keys of all
    other rows; then write the own rows sorted. Returns the index."""
    sizes = [_unit_rows(job, fs, file) for file in found]
    groups = job.own_groups(1 if size is None else len(size) for size in sizes)
    own = list(zip(found, groups, strict=True))
    stage, final = temporary.path("stage"), temporary.path("sorted")
    counts = write_rows(stage, job.schema, (_read(job, fs, f, g) for f, g in own))
    staged = open_memory_mapped(stage)
    keys = staged.select(job.keys.names)
    if job.partitions > 1:
        path = temporary.path("keys")
        others = ((f, g.others()) for f, g in own)
        other_counts = write_rows(path, job.keys, (_read_keys(job, fs, f, g) for f, g in others))
        counts = [a + b for a, b in zip(counts, other_counts, strict=True)]
        units = _units(own, sizes, counts)
        keys = _in_file_order(units, keys, open_memory_mapped(path))
    else:
        units = _units(own, sizes, counts)
    input = order_input(job, keys, units)
    metadata = {
        INPUT_KEY: _identify(job, fs, found),
        EVENT_TIME_RANGE_KEY: event_time_extent(job, keys),
    }
    if (order := input.own_order) is None:
        stage.replace(final)
    else:
        write_rows(final, job.schema, [reordered(staged, order)])
    publish(final, rows_path)
    return with_checksum(
        build_index(job, input, MappedRows(open_memory_mapped(rows_path))), metadata
    )


def _index_in_place(
    job: PreparationJob, fs: Any, found: list[FoundFile], temporary: _TemporaryFiles
) -> pa.Table | None:
    """The index of input that can be read in place; None for other input. Text without
    checksums (`verifies_checksums` is False: a reference execution) is not read in place: it would
    be parsed twice, for the index and for the rows."""
    in_place = None
    if job.files.format == "parquet":
        in_place = _parquet_in_place(job, fs, found, temporary.path("keys"))
    elif job.verifies_checksums:
        in_place = _text_in_place(job, fs, found, temporary.path("keys"))
    if in_place is None:
        return None
    input, splits = in_place
    table = build_index(job, input, _rows_in_place(job, fs, found, splits))
    metadata = {
        INPUT_KEY: _identify(job, fs, found),  # after the last reading: see require_unchanged
        EVENT_TIME_RANGE_KEY: event_time_extent(job, input.keys),
        IN_PLACE: _encode(splits),
    }
    return with_checksum(table, metadata)


def _parquet_in_place(
    job: PreparationJob, fs: Any, found: list[FoundFile], path: Path
) -> tuple[OrderedInput, list[FileSplit]] | None:
    """Parquet that is in order and has small row groups; None for other Parquet. Reads the keys of
    all partitions into a temporary file at `path`. The partition's own rows are read later, for the
    checksums of the index."""
    groups = [row_groups(fs, f.path, job.raw.names, job.name) for f in found]
    if any(group.bytes > MAX_IN_PLACE_BYTES for of_file in groups for group in of_file):
        return None
    sizes = [[group.rows for group in of_file] for of_file in groups]
    own = list(zip(found, job.own_groups(len(size) for size in sizes), strict=True))
    units = _units(own, sizes, [sum(size) for size in sizes])
    check = OrderCheck(job)
    try:
        write_rows(path, job.keys, (_check_order(check, _read_keys(job, fs, f)) for f in found))
    except NotInOrder:
        return None
    splits = [
        FileSplit(of_file.first, sum(n for at, n in enumerate(size) if at in of_file))
        for (_, of_file), size in zip(own, sizes, strict=True)
    ]
    return OrderedInput(units, open_memory_mapped(path), None), splits


def _check_order(check: OrderCheck, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises NotInOrder."""
    for batch in batches:
        check.observe(batch)
        yield batch


def _text_in_place(
    job: PreparationJob, fs: Any, found: list[FoundFile], path: Path
) -> tuple[OrderedInput, list[FileSplit]] | None:
    """Text that is in order and can be read in blocks (not compressed, no row with line ends); None
    for other text. Reads the partition's own files once, and the keys of the others; all keys are
    in a temporary file at `path`."""
    own = list(zip(found, job.own_groups(1 for _ in found), strict=True))
    scanned: list[TextBlocks] = []
    check = OrderCheck(job)

    def keys(file: FoundFile, groups: RowGroupSelection) -> Iterator[pa.RecordBatch]:
        scanned.append(TextBlocks())
        own_file = 0 in groups  # a text is one row group, number 0
        batches = _scan(job, fs, file, scanned[-1]) if own_file else _read_keys(job, fs, file)
        yield from _check_order(check, (batch.select(job.keys.names) for batch in batches))

    try:
        counts = write_rows(path, job.keys, (keys(file, groups) for file, groups in own))
    except (SchemaMismatch, NotInOrder):
        return None  # an invalid file is read again as a whole, which gives the error's message
    units = _units(own, [None] * len(found), counts)
    splits = [
        FileSplit(groups.first, count if 0 in groups else 0, text)
        for (_, groups), count, text in zip(own, counts, scanned, strict=True)
    ]
    return OrderedInput(units, open_memory_mapped(path), None), splits


def open_in_place(
    job: PreparationJob, fs: Any, found: list[FoundFile], recorded: bytes
) -> RowsInPlace:
    """The rows that are read in place; `recorded`: the index's metadata under IN_PLACE."""
    return _rows_in_place(job, fs, found, _decode(recorded))


def _encode(splits: Sequence[FileSplit]) -> bytes:
    """The splits as JSON; equal headers are written once."""
    headers: dict[tuple[str, ...], int] = {}
    encoded = []
    for split in splits:
        names = None if split.text is None else tuple(split.text.names)
        header = None if names is None else headers.setdefault(names, len(headers))
        blocks = [astuple(block) for block in split.text.blocks] if split.text else []
        encoded.append([split.first_group, split.rows, header, blocks])
    return to_json({"headers": list(headers), "pieces": encoded})


def _decode(recorded: bytes) -> list[FileSplit]:
    found = json.loads(recorded)
    headers = found["headers"]
    return [
        FileSplit(first_group, rows, None)
        if header is None
        else FileSplit(first_group, rows, TextBlocks(headers[header], [Block(*b) for b in blocks]))
        for first_group, rows, header, blocks in found["pieces"]
    ]


def _rows_in_place(
    job: PreparationJob, fs: Any, found: list[FoundFile], splits: Sequence[FileSplit]
) -> RowsInPlace:
    def read_from(row: int) -> Iterator[pa.RecordBatch]:
        for file, split in zip(found, splits, strict=True):
            if row < split.rows:
                yield from _read_split(job, fs, file, split, row)
            row = max(0, row - split.rows)

    kind = RowsInPlace if job.files.format == "parquet" else TextRowsInPlace
    return kind(job.name, job.schema, sum(split.rows for split in splits), read_from)


def _read_split(
    job: PreparationJob, fs: Any, file: FoundFile, split: FileSplit, first_row: int
) -> Iterator[pa.RecordBatch]:
    if split.text is None:
        return _read(job, fs, file, RowGroupSelection(split.first_group, job.partitions), first_row)
    text = read_blocks(fs, file.path, job.files, job.raw, job.name, split.text, first_row)
    return _with_computed_columns(job, file, text)


def _scan(
    job: PreparationJob, fs: Any, file: FoundFile, found: TextBlocks
) -> Iterator[pa.RecordBatch]:
    batches = scan_blocks(fs, file.path, job.files, job.raw, job.name, MAX_IN_PLACE_BYTES, found)
    return _with_computed_columns(job, file, batches)


def _unit_rows(job: PreparationJob, fs: Any, file: FoundFile) -> list[int] | None:
    """The number of rows of each row group; None if the file is one unit, whose rows are not
    counted yet."""
    if job.files.format != "parquet":
        return None
    return [group.rows for group in row_groups(fs, file.path, job.raw.names, job.name)]


def _units(
    own: Sequence[tuple[FoundFile, RowGroupSelection]],
    sizes: Sequence[list[int] | None],
    counts: Sequence[int],
) -> list[Unit]:
    """`counts`: the number of rows of each file."""
    units = []
    for (file, groups), size, count in zip(own, sizes, counts, strict=True):
        row = 0
        for group, rows in enumerate([count] if size is None else size):
            units.append(Unit(file.path, row, rows, group in groups))
            row += rows
    return units


def _in_file_order(units: Sequence[Unit], own: pa.Table, others: pa.Table) -> pa.Table:
    parts, at = [own.schema.empty_table()], {True: 0, False: 0}
    for unit in units:
        parts.append((own if unit.own else others).slice(at[unit.own], unit.rows))
        at[unit.own] += unit.rows
    return pa.concat_tables(parts)


def _read_keys(
    job: PreparationJob, fs: Any, file: FoundFile, groups: RowGroupSelection = ALL_ROW_GROUPS
) -> Iterator[pa.RecordBatch]:
    names = job.keys.names
    return (batch.select(names) for batch in _read(job.for_keys(), fs, file, groups))


def _identify(job: PreparationJob, fs: Any, found: list[FoundFile]) -> bytes:
    input_files = identify(fs, [file.path for file in found if job.verifies_checksums], job.name)
    require_unchanged(job, found)
    return encode_input_files(input_files)


def _read(
    job: PreparationJob, fs: Any, file: FoundFile, groups: RowGroupSelection, first_row: int = 0
) -> Iterator[pa.RecordBatch]:
    """The rows of one file, with the columns that are computed from them."""
    batches = read_batches(fs, file.path, job.files, job.raw, job.name, groups, first_row)
    return _with_computed_columns(job, file, batches)


def _with_computed_columns(
    job: PreparationJob, file: FoundFile, batches: NumberedBatches
) -> Iterator[pa.RecordBatch]:
    if job.files.file_name_column is not None:
        batches = _with_file_name(
            batches, job.files.file_name_column, _require_utf8(job, file.name)
        )
    if (expression := job.computed_event_time) is not None:
        batches = with_event_time(
            batches, expression, job.schema, f"source {job.name}: {file.path}"
        )
    return (batch for _, batch in batches)


def _require_utf8(job: PreparationJob, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as e:
        shown = name.encode(errors="backslashreplace").decode()
        raise SchemaMismatch(
            f"source {job.name}: the name of {shown} is not UTF-8, so fileNameColumn cannot have "
            "it; rename the file"
        ) from e
    return name


def _with_file_name(batches: NumberedBatches, column: str, name: str) -> NumberedBatches:
    for row, batch in batches:
        names = pa.array([name] * batch.num_rows, pa.string())
        yield row, batch.append_column(pa.field(column, pa.string()), names)


def require_unchanged(job: PreparationJob, found: list[FoundFile]) -> None:
    """Raises SourceFailed if a file has changed since it was listed: somebody may still be copying
    it to the input."""
    _, now = find_files(job.files.url, job.name)
    changed = sorted({file.path for file in {*found} ^ {*now}})
    if changed:
        raise SourceFailed(
            f"source {job.name}: {', '.join(changed[:3])} changed while it was read; what was "
            "read is discarded, and the input must not change while it is read again"
        )
