"""A prepared source is complete or prepared again; its bytes are verified at each cut."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from files_source_parts import csv, source_of, values_of_k

from rekindle.connectors import files_preparation, prepared
from rekindle.connectors.files_source import FilesSource
from rekindle.errors import SourceFailed

LINES = [f"k{n},{n}.5,2013-01-01T{n:02d}:00:00" for n in range(5)]
"""An hour apart: a row in each epoch."""


@pytest.fixture(autouse=True)
def rows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are copied to a prepared file, as if the input were not in order, and not read in
    place."""
    monkeypatch.setattr(files_preparation, "_index_in_place", lambda *_: None)


def opened(tmp: Path) -> FilesSource:
    return source_of(tmp, csv(tmp, *LINES))


def prepared_file(tmp: Path, suffix: str) -> Path:
    (path,) = (tmp / "work").glob(f"*{suffix}")
    return path


def all_keys(source: FilesSource) -> list[str]:
    return [key for epoch in range(source.last_epoch + 1) for key in values_of_k(source, epoch)]


def damage(tmp: Path) -> None:
    """Replace a value by zeros, like a block that was never written."""
    path = prepared_file(tmp, ".arrow")
    raw = path.read_bytes()
    at = raw.index(np.float64(3.5).tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(8))


@pytest.mark.parametrize("left", [b"", b"ARROW1", b"x" * 1000])
def test_a_torn_index_is_prepared_again(tmp_path: Path, left: bytes) -> None:
    opened(tmp_path)
    prepared_file(tmp_path, ".index").write_bytes(left)
    assert all_keys(opened(tmp_path)) == ["k0", "k1", "k2", "k3", "k4"]


def test_a_damaged_index_is_prepared_again(tmp_path: Path) -> None:
    opened(tmp_path)
    index = prepared_file(tmp_path, ".index")
    entries = prepared.open_memory_mapped(index)
    changed = entries.set_column(1, "start", pa.array([0] * entries.num_rows, pa.int64()))
    written = tmp_path / "other"
    prepared.write_rows(written, changed.schema, [changed.to_batches()])
    written.replace(index)
    assert all_keys(opened(tmp_path)) == ["k0", "k1", "k2", "k3", "k4"]


def test_torn_rows_are_prepared_again(tmp_path: Path) -> None:
    opened(tmp_path)
    os.truncate(prepared_file(tmp_path, ".arrow"), 100)
    assert all_keys(opened(tmp_path)) == ["k0", "k1", "k2", "k3", "k4"]


def test_damaged_rows_are_prepared_again_when_they_are_cut(tmp_path: Path) -> None:
    opened(tmp_path)
    damage(tmp_path)
    source = opened(tmp_path)
    assert source.cut(3).rows.column("v").to_pylist() == [3.5]
    assert all_keys(source) == ["k0", "k1", "k2", "k3", "k4"]


def test_damage_under_an_open_source_is_found(tmp_path: Path) -> None:
    source = opened(tmp_path)
    damage(tmp_path)
    assert source.cut(3).rows.column("v").to_pylist() == [3.5]


def test_a_broken_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(tmp_path)
    different = itertools.count()
    monkeypatch.setattr(prepared.MappedRows, "checksum", lambda *_: next(different))
    with pytest.raises(SourceFailed, match="epoch 3 are damaged on the local disk, even after"):
        source.cut(3)


def test_files_are_flushed_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flush(descriptor: int) -> None:
        done.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().suffix)
        fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        done.append("rename to " + target.suffix)
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    opened(tmp_path)
    assert done == [
        *(
            "fsync .stage",
            "rename to .sorted",
            "rename to .arrow",
            "fsync ",  # of the directory
        ),  # the input is already sorted
        *("fsync .index", "rename to .index", "fsync "),
    ]


@pytest.mark.parametrize("batch_bytes", [1, 500, 1 << 20])
def test_rows_are_reordered_in_batches(monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(prepared, "MAX_BATCH_BYTES", batch_bytes)
    rows = pa.table({"n": range(100), "s": [None if n % 7 == 0 else "x" * n for n in range(100)]})
    table = pa.Table.from_batches(rows.to_batches(max_chunksize=13))
    order = np.random.default_rng(1).permutation(100)
    batches = list(prepared.reordered(table, order))
    assert pa.Table.from_batches(batches).equals(rows.take(pa.array(order)).combine_chunks())
    assert len(batches) == (1 if batch_bytes > 1000 else len(batches))


def test_a_row_group_that_arrow_cannot_hold_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"k": ["a", "b", "c"]}), path, row_group_size=2)
    read = pq.ParquetFile.iter_batches

    def too_large(self: Any, *args: Any, row_groups: list[int], **options: Any) -> Any:
        if row_groups == [1]:
            raise pa.ArrowInvalid("offset overflow")
        return read(self, *args, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", too_large)
    schema = pa.schema([("k", pa.string())])
    options: dict[str, Any] = {"format": "parquet", "orderBy": None, "rowsPerSecond": 1}
    with pytest.raises(SourceFailed, match=r"row group 1 \(1 rows, .*offset overflow.* 2 GiB"):
        source_of(tmp_path, f"file://{path}", schema, speedup=None, **options)


def test_a_full_disk_while_preparing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> list[int]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_preparation, "write_rows", full)
    with pytest.raises(SourceFailed, match=r"cannot be prepared in .*No space left"):
        opened(tmp_path)
    monkeypatch.undo()
    assert not list((tmp_path / "work").iterdir())
    assert all_keys(opened(tmp_path)) == ["k0", "k1", "k2", "k3", "k4"]
