"""Reads rows of CSV and JSON-lines files in place, that is out of the input files at each cut and
not out of a prepared copy: in blocks of whole lines, starting at any block.

The first reading finds the blocks. Later readings read single blocks and give the same rows: the
digest of the bytes is verified, and they are parsed as the first time. A file whose lines may not
be rows (CSV with line ends in quotes, compressed files) has no blocks.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from rekindle.connectors.compression import is_named_as_compressed
from rekindle.connectors.csv_reading import parse_csv_block, read_csv_blocks
from rekindle.connectors.files_read import (
    NumberedBatches,
    converted,
    numbered,
    source_errors,
    text_rules,
)
from rekindle.connectors.json_reading import parse_json_block, raw_schema, read_json_blocks
from rekindle.connectors.line_blocks import BLOCK_BYTES, Block, NotReadableInBlocks, digest_of
from rekindle.connectors.prepared import DamagedRows
from rekindle.topology.kinds.files import FilesSourceSpec


@dataclass(slots=True)
class TextBlocks:
    """The blocks of a file, and the names of the values of a CSV row."""

    names: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


def scan_blocks(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    source: str,
    max_line_bytes: int,
    found: TextBlocks,
) -> NumberedBatches:
    """All rows of a file; while they are read, its blocks are added to `found`. Raises
    NotReadableInBlocks if the file cannot be read in blocks, or a line has more than
    `max_line_bytes`; SourceFailed."""
    where = f"source {source}: {path}"
    if is_named_as_compressed(path):
        raise NotReadableInBlocks(f"{where}: it is compressed")
    with source_errors(where):
        raw = numbered(_scanned(fs, path, options, schema, where, max_line_bytes, found))
        yield from converted(raw, schema, where, text_rules(options))
        with fs.open(path, "rb") as file:
            _require_seekable(file, where)


def _scanned(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    where: str,
    max_line_bytes: int,
    found: TextBlocks,
) -> Iterator[pa.RecordBatch]:
    if options.format == "csv":
        found.names, parts = read_csv_blocks(
            fs, path, options, schema, where, BLOCK_BYTES, max_line_bytes
        )
    else:
        opened = partial(fs.open, path, "rb")
        parts = read_json_blocks(opened, schema, BLOCK_BYTES, where, max_line_bytes)
    for offset, data, batch in parts:
        found.blocks.append(Block(offset, len(data), batch.num_rows, digest_of(data)))
        yield batch


def _require_seekable(file: Any, where: str) -> None:
    """Raises NotReadableInBlocks if the store cannot read a part of a file."""
    try:
        file.seek(1)
    except (OSError, ValueError) as e:
        raise NotReadableInBlocks(f"{where}: {e}") from e


def read_blocks(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    source: str,
    found: TextBlocks,
    first_row: int,
) -> NumberedBatches:
    """The rows of a text file from `first_row` on, a batch for each block. Raises DamagedRows if
    the file's bytes are not those that were found, SourceFailed if it cannot be read."""
    where = f"source {source}: {path}"
    with source_errors(where):
        raw = _raw_blocks(fs, path, options, schema, where, found, first_row)
        yield from converted(raw, schema, where, text_rules(options))


def _raw_blocks(
    fs: Any,
    path: str,
    options: FilesSourceSpec,
    schema: pa.Schema,
    where: str,
    found: TextBlocks,
    first_row: int,
) -> NumberedBatches:
    row = 0
    with fs.open(path, "rb") as file:
        for block in found.blocks:
            before, row = row, row + block.rows
            if row <= first_row:
                continue
            file.seek(block.offset)
            data = file.read(block.size)
            if digest_of(data) != block.digest:
                raise DamagedRows(
                    f"{where}: bytes {block.offset} to {block.offset + block.size} have changed "
                    "since the source was prepared; restore the file"
                )
            batch = _parsed_block(data, options, schema, where, found.names)
            skipped = max(0, first_row - before)
            yield before + skipped, batch.slice(skipped)


def _parsed_block(
    data: bytes, options: FilesSourceSpec, schema: pa.Schema, where: str, names: list[str]
) -> pa.RecordBatch:
    if options.format == "csv":
        return parse_csv_block(data, options, schema, names, where)
    # All lines were parsed when the source was prepared: no message needs their numbers.
    return parse_json_block(data, raw_schema(schema), 1, where)
