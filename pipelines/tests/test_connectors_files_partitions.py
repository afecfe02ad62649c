"""Partitions of a files source: together they are the source with one partition."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from files_source_parts import SCHEMA, T0, T0_US, csv, source_of, values_of_k
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors import csv_reading, files_index, files_preparation, files_read
from rekindle.connectors.files_source import FilesSource
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle.streams.epochs import END_OF_INPUT

HOUR = dt.timedelta(hours=1)
FILE = pa.field("file", pa.string())
Hours = list[float | None]


def write(tmp: Path, format: str, files: list[Hours], group: int) -> str:
    """A file for each list of times, in row groups of this size; an epoch is an hour."""
    (tmp / "in").mkdir(exist_ok=True)
    row = 0
    for n, hours in enumerate(files):
        path = tmp / "in" / f"{n}.{format}"
        rows: list[dict[str, Any]] = [
            {"k": f"k{at}", "v": at / 3, "t": None if h is None else T0 + h * HOUR}
            for at, h in enumerate(hours, row)
        ]
        row += len(rows)
        texts = [{**r, "t": None if r["t"] is None else r["t"].isoformat()} for r in rows]
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, group)
        elif format == "json":
            path.write_text("".join(json.dumps(r) + "\n" for r in texts))
        else:
            lines = (f"{r['k']},{r['v']!r},{r['t'] or 'NA'}" for r in texts)
            path.write_text("\n".join(("k,v,t", *lines)) + "\n")
    return f"file://{tmp}/in/*.{format}"


def opened(tmp: Path, url: str, partitions: int, **options: Any) -> list[FilesSource]:
    """All partitions, with one directory for what they prepare."""
    return [source_of(tmp, url, partition=(n, partitions), **options) for n in range(partitions)]


def rows(source: FilesSource, epoch: int) -> list[dict[str, Any]]:
    return source.cut(epoch).rows.to_pylist()  # type: ignore[no-any-return]


def assert_together(whole: FilesSource, parts: list[FilesSource], epochs: list[int]) -> None:
    order = {
        row["k"]: at
        for at, row in enumerate(r for e in range(whole.last_epoch + 1) for r in rows(whole, e))
    }
    for epoch in epochs:
        found = [rows(part, epoch) for part in parts]
        for of_part in found:
            assert of_part == sorted(of_part, key=lambda row: order[row["k"]])
        together = sorted((r for of_part in found for r in of_part), key=lambda r: order[r["k"]])
        assert together == rows(whole, epoch)
        assert {part.cut(epoch).watermark for part in parts} == {whole.cut(epoch).watermark}
    for part in parts:
        assert part.schema == whole.schema
        assert part.input_files == whole.input_files
        assert part.last_epoch == whole.last_epoch
        assert [part.next_epoch_to_cut(e) for e in epochs] == [
            whole.next_epoch_to_cut(e) for e in epochs
        ]
        assert part.cut(whole.last_epoch + 1).watermark == END_OF_INPUT
        assert part.summary.first_us == whole.summary.first_us
        assert part.summary.last_us == whole.summary.last_us
    assert sum(part.summary.rows or 0 for part in parts) == whole.summary.rows


_HOURS = st.floats(0, 6).map(lambda h: round(h, 3))
_OPTIONS: list[dict[str, Any]] = [
    {},
    {"orderBy": None},
    {"orderBy": None, "speedup": None, "rowsPerSecond": 0.7},
    {"orderBy": "k", "speedup": None, "rowsPerSecond": 2},
    {"orderBy": "k"},
    {"orderBy": "file", "fileNameColumn": "file"},
    {"orderBy": None, "fileNameColumn": "file"},
]


@given(
    format=st.sampled_from(["parquet", "parquet", "csv", "json"]),
    files=st.lists(st.lists(st.one_of(st.none(), _HOURS), max_size=5), min_size=1, max_size=3),
    options=st.sampled_from(_OPTIONS),
    in_order=st.booleans(),
    group=st.integers(1, 5),
    partitions=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_partitions_together_have_the_rows_and_watermarks_of_one(
    format: str,
    files: list[Hours],
    options: dict[str, Any],
    in_order: bool,
    group: int,
    partitions: int,
    seed: int,
) -> None:
    if in_order or options == {}:  # without NULLs: in `orderBy`, which is t, one is an error
        times = sorted(h for hours in files for h in hours if h is not None)
        ends = sorted(random.Random(seed).choices(range(len(times) + 1), k=len(files) - 1))
        cuts = [0, *ends, len(times)]
        files = [list(times[a:b]) for a, b in itertools.pairwise(cuts)]
        if options == {} and not in_order:
            files = [random.Random(seed).sample(hours, len(hours)) for hours in files]
    if "speedup" not in options and not any(h is not None for hours in files for h in hours):
        return
    if format == "json":
        files = [hours for hours in files if any(h is not None for h in hours)]
        if not files:
            return  # a field that no row of a file has is an error
    schema = SCHEMA.append(FILE) if "fileNameColumn" in options else SCHEMA
    given: dict[str, Any] = {"schema": schema, "format": format, "lateness": "30m", **options}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        url = write(Path(one), format, files, group)
        whole = source_of(Path(other), url, **given)
        parts = opened(Path(one), url, partitions, **given)
        epochs = list(range(whole.last_epoch + 2))
        assert_together(whole, parts, epochs)
        random.Random(seed).shuffle(epochs)
        again = opened(Path(one), url, partitions, **given)
        assert_together(whole, again, epochs)


def prepared_suffixes(tmp: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp / "work").iterdir())


def test_units_belong_to_partitions_in_turn(tmp_path: Path) -> None:
    url = write(tmp_path, "parquet", [[0, 0, 0], [0, 0], [0]], group=1)
    parts = opened(tmp_path, url, 2, format="parquet")
    assert [values_of_k(part, 0) for part in parts] == [["k0", "k2", "k4"], ["k1", "k3", "k5"]]
    assert prepared_suffixes(tmp_path) == [".index"] * 2
    url = write(tmp_path, "csv", [[0, 0, 0], [0, 0], [0]], group=1)
    parts = opened(tmp_path, url, 2)
    assert [values_of_k(part, 0) for part in parts] == [["k0", "k1", "k2", "k5"], ["k3", "k4"]]


def test_a_partition_opens_row_groups_of_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write(tmp_path, "parquet", [[n / 4 for n in range(12)], [3, 3.5]], group=2)
    source = opened(tmp_path, url, 3, format="parquet")[1]
    read: list[int] = []
    batches = pq.ParquetFile.iter_batches

    def count(self: Any, *args: Any, row_groups: list[int], **options: Any) -> Any:
        read.extend(row_groups)
        return batches(self, *args, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", count)
    for epoch in range(5):
        source.cut(epoch)
    assert read == [1, 4], "units 1 and 4; the other file is unit 6"


def test_a_partition_copies_rows_of_its_own_alone(tmp_path: Path) -> None:
    url = write(tmp_path, "parquet", [[5, 4, 3, 2, 1, 0]], group=2)
    parts = opened(tmp_path, url, 3, format="parquet")
    assert [part.summary.rows for part in parts] == [2, 2, 2]
    assert [values_of_k(parts[1], epoch) for epoch in range(6)] == [[], [], ["k3"], ["k2"], [], []]
    copied = [
        pa.ipc.open_file(pa.memory_map(str(path))).read_all().num_rows
        for path in (tmp_path / "work").glob("*.arrow")
    ]
    assert copied == [2, 2, 2]


def test_a_partition_without_units_has_epochs_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = csv(tmp_path, "a,1,2013-01-01T00:00:00Z", "b,1,2013-01-01T02:00:00Z")
    with caplog.at_level(logging.WARNING):
        one, other = opened(tmp_path, url, 2)
    assert "partition 1 has no rows: the input has too few files or row groups" in caplog.text
    assert "partition 0" not in caplog.text
    assert other.summary.rows == 0
    assert other.last_epoch == one.last_epoch == 2
    marks = [other.cut(epoch).watermark for epoch in range(4)]
    assert marks == [T0_US, T0_US, T0_US + 7_200_000_000, END_OF_INPUT]
    assert other.cut(0).rows.num_rows == 0
    assert other.schema == SCHEMA


def test_an_input_without_rows_ends_at_once_in_all_partitions(tmp_path: Path) -> None:
    parts = opened(tmp_path, csv(tmp_path), 2)
    assert [part.cut(0).watermark for part in parts] == [END_OF_INPUT] * 2


def test_partitions_of_one_directory_keep_each_others_files(tmp_path: Path) -> None:
    url = write(tmp_path, "csv", [[1, 0], [0, 1]], group=1)
    opened(tmp_path, url, 2)
    before = {path.name for path in (tmp_path / "work").iterdir()}
    assert len(before) == 4
    opened(tmp_path, url, 2)
    assert {path.name for path in (tmp_path / "work").iterdir()} == before


def test_an_order_key_that_is_wrong_in_any_unit_is_named_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write(tmp_path, "parquet", [[0, 1], [2, 3, None]], group=1)
    for partition in range(2):
        with pytest.raises(SchemaMismatch, match=r"1\.parquet: column t, row 3: .* by NULL"):
            source_of(tmp_path, url, format="parquet", partition=(partition, 2))
    csv(tmp_path, "a,1,2013-01-01", name="0.csv")
    csv(tmp_path, "a,1,2013-01-01", "b,1,yesterday", name="1.csv")
    with pytest.raises(SchemaMismatch, match=r"1\.csv: column t, row 2: 'yesterday' is not"):
        source_of(tmp_path, f"file://{tmp_path}/?.csv", partition=(0, 2))


def test_a_row_of_a_later_row_group_is_named_by_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_preparation, "MAX_IN_PLACE_BYTES", 0)  # rows are copied
    texts = pa.table({"k": ["a"] * 4, "t": ["2013-01-01"] * 3 + ["never"]})
    pq.write_table(texts, tmp_path / "in.parquet", row_group_size=1)
    url, schema = f"file://{tmp_path}/in.parquet", pa.schema([SCHEMA.field("k"), SCHEMA.field("t")])
    with pytest.raises(SourceFailed, match=r"column t, row 4: 'never' is not"):
        source_of(tmp_path, url, schema, format="parquet", partition=(1, 2))


def test_other_partitions_units_are_read_for_their_order_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write(tmp_path, "csv", [[1, 0], [0, 1]], group=1)
    seen: list[tuple[str, list[str]]] = []
    read = csv_reading.read_csv

    def reading(fs: Any, path: str, options: Any, schema: pa.Schema, where: str) -> Any:
        seen.append((path[-5:], schema.names))
        return read(fs, path, options, schema, where)

    monkeypatch.setattr(files_read, "read_csv", reading)
    source_of(tmp_path, url, partition=(1, 2))
    assert seen == [("0.csv", ["t"]), ("1.csv", ["k", "v", "t"]), ("0.csv", ["t"])]


def test_columns_without_a_header_are_found_by_position(tmp_path: Path) -> None:
    for n in range(2):
        lines = (f"k{n},{n},2013-01-01T0{n}:00:00Z", f"l{n},{n},2013-01-01T03:00:00Z")
        csv(tmp_path, *lines[1:], name=f"{n}.csv", header=lines[0])
    parts = opened(tmp_path, f"file://{tmp_path}/?.csv", 2, header=False)
    assert [[values_of_k(part, epoch) for epoch in range(4)] for part in parts] == [
        [["k0"], [], [], ["l0"]],
        [[], ["k1"], [], ["l1"]],
    ]


@pytest.mark.parametrize("partition", [(0, 1), (1, 2)])
def test_parquet_that_is_replaced_between_order_keys_and_rows_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: tuple[int, int]
) -> None:
    url = write(tmp_path, "parquet", [[0, 1, 2, 3]], group=1)
    index = files_index.build_index

    def replacing(*args: Any) -> pa.Table:
        write(tmp_path, "parquet", [[3, 2, 1, 0, 4]], group=1)
        return index(*args)

    monkeypatch.setattr(files_preparation, "build_index", replacing)
    with pytest.raises(SourceFailed, match="changed while it was read"):
        source_of(tmp_path, url, format="parquet", partition=partition)
