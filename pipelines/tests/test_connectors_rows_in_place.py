"""Parquet that is in order is cut where it is, in the same epochs as a copy."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from files_source_parts import SCHEMA, T0, source_of, values_of_k
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors import files_preparation, files_read
from rekindle.connectors.files_source import FilesSource
from rekindle.errors import SourceFailed
from rekindle.streams.digest import digest_table

HOUR = dt.timedelta(hours=1)


def table(hours: list[float | None], first: int = 0) -> pa.Table:
    rows = [
        {"k": f"k{n}", "v": n / 3, "t": None if h is None else T0 + h * HOUR}
        for n, h in enumerate(hours, first)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def write(tmp: Path, hours: list[list[float | None]], row_group_size: int = 3) -> str:
    """A file for each list of times; an epoch is an hour."""
    first = 0
    (tmp / "in").mkdir(exist_ok=True)
    for n, part in enumerate(hours):
        pq.write_table(table(part, first), tmp / "in" / f"{n}.parquet", row_group_size)
        first += len(part)
    return f"file://{tmp}/in/*.parquet"


def opened(tmp: Path, hours: list[list[float | None]], **options: Any) -> FilesSource:
    return source_of(tmp, write(tmp, hours), format="parquet", **options)


def prepared_suffixes(tmp: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp / "work").iterdir())


def cuts(source: FilesSource, epochs: list[int]) -> list[tuple[str, int]]:
    found = [source.cut(epoch) for epoch in epochs]
    return [(digest_table(cut.rows), cut.watermark) for cut in found]


def test_ordered_parquet_is_not_copied(tmp_path: Path) -> None:
    source = opened(tmp_path, [[0, 0.5, 1, 2, 2.5], [2.7, 5]])
    assert prepared_suffixes(tmp_path) == [".index"]
    assert [values_of_k(source, n) for n in range(7)] == [
        *(["k0", "k1"], ["k2"], ["k3", "k4", "k5"], [], [], ["k6"], [])
    ]
    assert source.summary.rows == 7


def test_parquet_that_is_not_in_order_is_copied(tmp_path: Path) -> None:
    source = opened(tmp_path, [[2, 0, 1], [1]])
    assert prepared_suffixes(tmp_path) == [".arrow", ".index"]
    assert [values_of_k(source, n) for n in range(3)] == [["k1"], ["k2", "k3"], ["k0"]]


def test_large_row_groups_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_preparation, "MAX_IN_PLACE_BYTES", 200)
    source = opened(tmp_path, [[0, 1, 2]])
    assert prepared_suffixes(tmp_path) == [".arrow", ".index"]
    assert values_of_k(source, 1) == ["k1"]


def test_input_that_becomes_ordered_leaves_no_copy(tmp_path: Path) -> None:
    opened(tmp_path, [[2, 0, 1]])
    opened(tmp_path, [[0, 1, 2]])
    assert prepared_suffixes(tmp_path) == [".index"]


_HOURS = st.floats(0, 6).map(lambda h: round(h, 3))


@given(
    hours=st.lists(st.lists(st.one_of(st.none(), _HOURS), max_size=5), min_size=1, max_size=3),
    options=st.sampled_from(
        [
            {},
            {"orderBy": None},
            {"orderBy": None, "speedup": None, "rowsPerSecond": 0.7},
            {"orderBy": "file", "fileNameColumn": "file"},
        ]
    ),
    group=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_cuts_in_any_order_are_those_of_a_copy(
    hours: list[list[float | None]], options: dict[str, Any], group: int, seed: int
) -> None:
    if options == {}:  # in order, without NULL
        flat = sorted(h for part in hours for h in part if h is not None)
        ends = [0, len(flat) // 3, len(flat)]
        hours = [list(flat[a:b]) for a, b in itertools.pairwise(ends)]
    if "speedup" not in options and not any(h is not None for part in hours for h in part):
        return
    schema = SCHEMA
    if "fileNameColumn" in options:
        schema = schema.append(pa.field("file", pa.string()))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        url = write(Path(one), hours, group)
        in_place = source_of(Path(one), url, schema, format="parquet", **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files_preparation, "_index_in_place", lambda *_: None)
            copied = source_of(Path(other), url, schema, format="parquet", **options)
        assert prepared_suffixes(Path(one)) == [".index"]
        assert prepared_suffixes(Path(other)) == [".arrow", ".index"]
        assert in_place.summary == copied.summary
        assert in_place.last_epoch == copied.last_epoch
        forward = list(range(copied.last_epoch + 2))
        mixed = random.Random(seed).choices(forward, k=8)
        for epochs in (forward, mixed):
            assert cuts(in_place, epochs) == cuts(copied, epochs)
        again = source_of(Path(one), url, schema, format="parquet", **options)
        assert cuts(again, mixed) == cuts(copied, mixed)


def test_cuts_that_go_forward_read_each_row_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours: list[float | None] = [n / 4 for n in range(48)]
    source = opened(tmp_path, [hours[:24], hours[24:]])
    read: list[int] = []
    batches = pq.ParquetFile.iter_batches

    def count(self: Any, *args: Any, row_groups: list[int], **options: Any) -> Any:
        read.extend(row_groups)
        return batches(self, *args, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", count)
    for epoch in range(12):
        source.cut(epoch)
        source.cut(epoch)
    assert read == [*range(8), *range(8)]
    read.clear()
    source.cut(4)
    assert read == [5, 6], "the groups of rows 16 to 19"


def test_a_cut_is_one_chunk_wherever_the_reader_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_read, "BATCH_ROWS", 2)
    source = opened(tmp_path, [[n / 10 for n in range(30)]])
    for epoch in (0, 1, 2, 1, 0):
        assert source.cut(epoch).rows.column("k").num_chunks == 1


def test_an_index_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path, [[0, 1, 2]])
    (index,) = (tmp_path / "work").iterdir()
    written = index.stat().st_mtime_ns
    again = source_of(tmp_path, f"file://{tmp_path}/in/*.parquet", format="parquet")
    assert values_of_k(again, 1) == ["k1"]
    assert index.stat().st_mtime_ns == written


def test_a_file_that_changes_under_an_open_source_is_found(tmp_path: Path) -> None:
    source = opened(tmp_path, [[0, 1, 2], [3, 4]])
    assert values_of_k(source, 0) == ["k0"]
    pq.write_table(table([3.0, 4.5], 7), tmp_path / "in" / "1.parquet")
    with pytest.raises(SourceFailed, match=r"1\.parquet changed"):
        source.cut(4)


def test_rows_that_are_missing_are_reported(tmp_path: Path) -> None:
    source = opened(tmp_path, [[0, 1, 2], [3, 4, 4]])
    pq.write_table(table([3.0], 3), tmp_path / "in" / "1.parquet")
    with pytest.raises(SourceFailed, match="end at row 4 instead of 6; they have changed"):
        source.cut(4)


def test_a_cut_is_repeated_when_the_store_is_back(tmp_path: Path) -> None:
    source = opened(tmp_path, [[0, 1, 2], [3, 4]])
    (tmp_path / "in").rename(tmp_path / "away")
    with pytest.raises(SourceFailed, match="check that its store can be reached"):
        source.cut(2)
    (tmp_path / "away").rename(tmp_path / "in")
    assert [values_of_k(source, n) for n in (2, 3, 4)] == [["k2"], ["k3"], ["k4"]]
