"""The files source: cuts, preparation of the input, and messages for a wrong one."""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
import itertools
import json
import lzma
import os
import random
import tracemalloc
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError
from files_source_parts import SCHEMA, SECOND, T0, T0_US, csv, source_of, values_of_k
from fsspec.implementations.memory import MemoryFileSystem
from schema_parts import topology_schema

from rekindle.connectors import files_index, files_preparation
from rekindle.connectors.files_job import PreparationJob
from rekindle.connectors.files_read import find_files, read_batches
from rekindle.connectors.prepared import MappedRows
from rekindle.connectors.source import SourceSummary
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK
from rekindle.topology.kinds.files import FilesSourceSpec


@pytest.fixture(autouse=True, scope="module")
def small_portions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_index, "PORTION_ROWS", 3)
        yield


def test_rows_fall_into_epochs_by_event_time_and_are_sorted_stably(tmp_path: Path) -> None:
    url = csv(
        tmp_path,
        "c,1,2013-01-01T02:00:00Z",
        "a,2,2013-01-01T00:00:00Z",
        "b,NA,2013-01-01 00:59:59.999999",
        "d,4,2013-01-01T02:00:00Z",
        'NA,5,"2013-01-01T05:00:00+01:00"',
    )
    source = source_of(tmp_path, url, lateness="30m")
    assert [values_of_k(source, e) for e in range(6)] == [
        ["a", "b"],
        [],
        ["c", "d"],
        [],
        [None],
        [],
    ]
    assert source.cut(0).rows.column("v").to_pylist() == [2.0, None]
    assert source.schema == SCHEMA
    assert source.cut(0).rows.schema == SCHEMA
    assert source.last_epoch == 4
    watermarks = [source.cut(e).watermark for e in range(7)]
    late = 1800 * SECOND
    first, second = T0_US + 3600 * SECOND - 1 - late, T0_US + 7200 * SECOND - late
    third = T0_US + 4 * 3600 * SECOND - late
    assert watermarks == [first, first, second, second, third, END_OF_INPUT, END_OF_INPUT]


def test_event_times_are_those_of_all_rows_through_an_epoch(tmp_path: Path) -> None:
    url = csv(
        tmp_path,
        "a,1,2013-01-01T00:00:00Z",
        "b,1,2013-01-01T03:00:00Z",
        "late,1,2013-01-01T01:00:00Z",
    )
    source = source_of(tmp_path, url, lateness="30m", orderBy=None)
    hour = 3600 * SECOND
    newest = [T0_US, T0_US, T0_US, T0_US + 3 * hour, T0_US + 3 * hour]
    assert [source.event_times(e).newest_us for e in range(5)] == newest
    assert source.event_times(-1).newest_us == NO_WATERMARK
    for epoch in range(5):
        assert source.event_times(epoch).watermark == source.cut(epoch).watermark


def test_an_input_without_rows_ends_at_once(tmp_path: Path) -> None:
    source = source_of(tmp_path, csv(tmp_path))
    assert source.last_epoch == NO_EPOCH
    assert source.cut(0).watermark == END_OF_INPUT
    assert source.cut(0).rows.num_rows == 0


def test_the_summary_has_all_rows_and_the_first_and_last_event_time(tmp_path: Path) -> None:
    times = ("", "2013-01-01T02:00:00Z", "2013-01-01T00:00:00Z", "2013-01-01T01:00:00Z")
    url = csv(tmp_path, *(f"{n},1,{time}" for n, time in enumerate(times)))
    by_key: dict[str, Any] = {"orderBy": "k", "speedup": None, "rowsPerSecond": 1}
    summary = source_of(tmp_path, url, **by_key).summary
    assert summary == SourceSummary(4, T0_US, T0_US + 7200 * SECOND)
    without = pa.schema([("k", pa.string())])
    assert source_of(tmp_path, url, without, **by_key).summary == SourceSummary(4, None, None)
    empty = csv(tmp_path, name="empty.csv")
    assert source_of(tmp_path, empty, **by_key).summary == SourceSummary(0, None, None)


def test_rows_per_second_paces_by_row_number(tmp_path: Path) -> None:
    url = csv(tmp_path, *(f"{i},1,2013-01-01T00:00:00Z" for i in range(7)))
    source = source_of(tmp_path, url, speedup=None, rowsPerSecond=2.5, orderBy=None)
    assert [len(values_of_k(source, e)) for e in range(4)] == [3, 2, 2, 0]


def test_without_an_order_a_late_or_null_time_goes_into_the_open_epoch(tmp_path: Path) -> None:
    url = csv(
        tmp_path,
        "n,1,NA",
        "a,1,2013-01-01T00:00:00Z",
        "b,1,2013-01-01T03:00:00Z",
        "late,1,2013-01-01T01:00:00Z",
        "null,1,NA",
    )
    source = source_of(tmp_path, url, orderBy=None)
    assert values_of_k(source, 0) == ["n", "a"]
    assert values_of_k(source, 3) == ["b", "late", "null"]


def test_files_of_a_glob_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    csv(tmp_path, "b,1,2013-01-01T00:00:00Z", name="part-2.csv")
    csv(tmp_path, "a,1,2013-01-01T00:00:00Z", name="part-1.csv")
    source = source_of(tmp_path, f"file://{tmp_path}/part-*.csv")
    assert values_of_k(source, 0) == ["a", "b"]


def file_names(url: str) -> list[str]:
    return [f.path.rpartition("/")[2] for f in find_files(url, "s")[1]]


@pytest.mark.parametrize("partitions", [1, 3])
def test_memory_does_not_grow_with_an_input_in_order(
    monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """Each partition looks at the keys of all rows: those of one portion at a time."""
    monkeypatch.setattr(files_index, "PORTION_ROWS", 2_000)
    count = 200_000
    times = pa.array(range(T0_US, T0_US + count)).cast(SCHEMA.field("t").type)
    files = FilesSourceSpec.model_validate(
        {"url": "file:///in", "format": "parquet", "orderBy": "t", "speedup": 1}
    )
    columns = topology_schema(SCHEMA)
    job = PreparationJob(
        "s", files, columns, "t", None, SECOND // 50, 0, partitions, verifies_checksums=False
    )
    table = pa.table({"t": times})
    units = [files_index.Unit("in", n, 1000, n % partitions == 0) for n in range(200)]
    tracemalloc.start()
    try:
        input = files_index.OrderedInput(units, table, None)
        index = files_index.build_index(job, input, MappedRows(table))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.column("epoch").to_pylist() == list(range(10))
    assert peak < times.nbytes / 4


def test_hidden_files_and_directories_are_not_read(tmp_path: Path) -> None:
    root = tmp_path / "_own" / "data"
    for directory in ("", "day=1", "_temporary/0", ".spark-staging", "day=1/_x/y"):
        (root / directory).mkdir(parents=True, exist_ok=True)
        csv(root / directory, name=f"in{len(directory)}.csv")
        csv(root / directory, name="_SUCCESS")
    read = ["in5.csv", "in0.csv"]
    assert file_names(f"file://{root}") == file_names(f"file://{root}/") == read
    assert file_names(f"file://{root}/**/*.csv") == read
    assert file_names(f"file://{root}/*.csv") == ["in0.csv"]
    assert file_names(f"file://{root}/_temporary/*/*.csv") == ["in12.csv"]
    assert file_names(f"file://{root}/_temp*/*/*.csv") == ["in12.csv"]
    assert file_names(f"file://{root}/_SUCCESS") == ["_SUCCESS"]


def test_parquet_json_and_csv_give_the_same_cuts(tmp_path: Path) -> None:
    times = [T0 + dt.timedelta(minutes=17 * i) for i in range(50)]
    table = pa.table(
        {
            "more": list(range(50)),
            "t": pa.array(times, pa.timestamp("ms")),
            "v": [i / 7 if i % 5 else None for i in range(50)],
            "k": [f"k{i % 3}" for i in range(50)],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    rows = table.to_pylist()
    lines = [json.dumps({**r, "t": r["t"].isoformat()}) for r in rows]
    (tmp_path / "in.json").write_text("\n".join(lines))
    texts = [
        f"{r['k']},{'NA' if r['v'] is None else repr(r['v'])},{r['t'].isoformat()}" for r in rows
    ]
    csv(tmp_path, *texts)
    sources = [
        source_of(tmp_path / f, f"file://{tmp_path}/in.{f}", format=f)
        for f in ("csv", "json", "parquet")
    ]
    for epoch in range(15):
        first, *others = [s.cut(epoch) for s in sources]
        assert all(first.rows.equals(o.rows) and first.watermark == o.watermark for o in others)
    assert sum(sources[0].cut(e).rows.num_rows for e in range(15)) == 50


@pytest.mark.parametrize(
    ("lines", "header", "message"),
    [
        (["a,1,2013-01-01", "b,x,2013-01-01"], "k,v,t", r"in.csv: column v, row 2: 'x' is not"),
        (["a,1,2013-13-01"], "k,v,t", r"column t, row 1: '2013-13-01' is not a TIMESTAMP"),
        (["a,1"], "k,v", r"no column t; the file has k, v"),
        (["a,1,2013-01-01", "b,1,NA"], "k,v,t", r"column t, row 2: rows cannot be ordered by NULL"),
        (["a,1,2013-01-01", "b,1"], "k,v,t", r"in.csv: a row has 2 values instead of 3"),
    ],
)
def test_a_bad_file_is_named_with_its_row_and_column(
    tmp_path: Path, lines: list[str], header: str, message: str
) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        source_of(tmp_path, csv(tmp_path, *lines, header=header))


CSV = b"k,v,t\n" + b"".join(b"k%d,%d,2013-01-01\n" % (i, i * i) for i in range(2000))
JSON = b"".join(b'{"k": "k%d", "v": %d, "t": "2013-01-01"}\n' % (i, i * i) for i in range(2000))


def damaged(data: bytes) -> bytes:
    """Compressed data whose first block has an invalid type."""
    packed = gzip.compress(data)
    return packed[:10] + b"\xff" + packed[11:]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.csv.gz", gzip.compress(CSV)[:-3000], "ended before.*copy it again"),
        ("in.csv.gz", gzip.compress(CSV)[:15], "ended before.*copy it again"),
        ("in.csv.gz", damaged(CSV), "Error -3 while decompressing.*copy it again"),
        ("in.csv.gz", gzip.compress(CSV)[:-8] + bytes(8), "CRC.*copy it again"),
        ("in.csv.gz", CSV, "the content is not gzip: copy the file again"),
        ("in.csv.xz", lzma.compress(CSV)[:50] + bytes(50), "orrupt.*copy it again"),
        ("in.csv.bz2", bz2.compress(CSV)[:50] + bytes(500), "Invalid data stream"),
        ("in.csv.zip", CSV, "the content is not zip: copy the file again"),
        ("in.csv", "k,v,t,größe\n".encode("latin-1"), "is not UTF-8.*set the encoding"),
        ("in.csv", CSV + "größe,1,\n".encode("latin-1"), "is not UTF-8.*set the encoding"),
        ("in.csv", b"k,v,t," + b"x" * 140_000, "field larger than.*correct the file"),
        ("in.json.gz", gzip.compress(JSON)[:-3000], "ended before.*copy it again"),
        ("in.json.gz", damaged(JSON), "Error -3 while decompressing.*copy it again"),
        ("in.json", b"[" * 200_000, "line 1.*correct the file"),
        ("in.json", b"null\n" + JSON, "line 1: 'null': null instead of an object.*correct the"),
        ("in.json.gz", gzip.compress(JSON + b"\nnull"), "null instead of an object.*correct the"),
        (
            "in.parquet",
            b"PAR1" + bytes(50),
            "not a complete Parquet.*correct the source's",
        ),
        ("in.parquet", b"PAR1" + bytes(50) + b"\x09\0\0\0PAR1", "the file is complete"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_a_damaged_file_is_named_and_read_when_repaired(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    path, format = tmp_path / name, name.split(".")[1]
    path.write_bytes(data)
    with pytest.raises(SourceFailed, match=rf"(?s)source s: .*{name}.*{message}"):
        source_of(tmp_path, f"file://{path}", format=format)
    assert not list((tmp_path / "work").iterdir())
    path.unlink()
    url = csv(tmp_path, "a,1,2013-01-01")
    assert values_of_k(source_of(tmp_path, url), 0) == ["a"]


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("members", [[], ["1", "2"], ["folder/", "folder/1"]], ids=len)
def test_a_zip_archive_has_exactly_one_file(
    tmp_path: Path, members: list[str], format: str
) -> None:
    data = b"k,v,t\na,1,2013-01-01\n" if format == "csv" else JSON.splitlines()[0]
    path = tmp_path / f"in.{format}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, data)
    with pytest.raises(SourceFailed, match=r"in\.\w+\.zip: the archive has .*unpack it"):
        source_of(tmp_path, f"file://{path}", format=format)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("1", data)
    source_of(tmp_path, f"file://{path}", format=format)


@pytest.mark.parametrize("refuses", ["info", "_open"])
def test_an_unreachable_store_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise EndpointConnectionError(endpoint_url="http://store:9000/in.csv")

    url = f"memory://{uuid.uuid4().hex}/in.csv"
    MemoryFileSystem().pipe_file(url, b"k,v,t\na,1,2013-01-01\n")
    monkeypatch.setattr(MemoryFileSystem, refuses, refuse)
    with pytest.raises(SourceFailed, match=r"in.csv cannot be read: Could not.*can be reached"):
        source_of(tmp_path, url)
    monkeypatch.undo()
    assert values_of_k(source_of(tmp_path, url), 0) == ["a"]


def test_a_bad_json_line_is_named(tmp_path: Path) -> None:
    good = '{"k": "a", "v": 1, "t": "2013-01-01T00:00:00Z"}'
    (tmp_path / "in.json").write_text(f'{good}\n{{"k": "b", "v": "x", "t": null}}\n')
    with pytest.raises(SchemaMismatch, match=r"in.json, line 2"):
        source_of(tmp_path, f"file://{tmp_path}/in.json", format="json")


def test_a_json_field_may_be_missing_in_some_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    url = f"file://{path}"
    path.write_text('{"k": "a", "t": "2013-01-01"}\n\n{"t": "2013-01-01", "v": null}\n')
    source = source_of(tmp_path, url, format="json")
    assert source.cut(0).rows.select(["k", "v"]).to_pylist() == [
        {"k": "a", "v": None},
        {"k": None, "v": None},
    ]
    path.write_text('{"k": "a", "t": "2013-01-01"}\n{"k": "b", "V": 1, "t": "2013-01-01"}\n')
    with pytest.raises(SchemaMismatch, match=r"no row has a field v; the file has V, k, t"):
        source_of(tmp_path, url, format="json")


DAYS = pa.schema([("k", pa.string()), ("day", pa.date32())])


def test_speedup_follows_the_days_of_a_date_column(tmp_path: Path) -> None:
    lines = ("a,2013-01-01", "c,2013-01-03", "b,2013-01-02", "d,2013-01-03")
    url = csv(tmp_path, *lines, header="k,day")
    source = source_of(tmp_path, url, DAYS, orderBy="day", speedup=86_400)
    assert [values_of_k(source, epoch) for epoch in range(4)] == [["a"], ["b"], ["c", "d"], []]
    assert source.last_epoch == 2


@pytest.mark.parametrize("day", [-(2**31), 106_751_992])
def test_a_date_outside_the_times_of_64_bits_is_named(tmp_path: Path, day: int) -> None:
    days = pa.array([0, day], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"k": ["a", "b"], "day": days}), tmp_path / "in.parquet")
    url = f"file://{tmp_path}/in.parquet"
    with pytest.raises(SchemaMismatch, match=r"column day .* speedup.* rowsPerSecond"):
        source_of(tmp_path, url, DAYS, format="parquet", orderBy="day", speedup=86_400)


def test_wrong_options_of_a_files_source_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="no file at"):
        source_of(tmp_path, f"file://{tmp_path}/nothing.csv")
    url = csv(tmp_path, "a,1,2013-01-01")
    with pytest.raises(SourceFailed, match="need a replay speed"):
        source_of(tmp_path, url, speedup=None)
    with pytest.raises(SourceFailed, match="orderBy names x"):
        source_of(tmp_path, url, orderBy="x")
    with pytest.raises(SourceFailed, match="speedup needs a column of times"):
        source_of(tmp_path, url, pa.schema([("k", pa.string())]), orderBy=None)


def test_prepared_files_are_reused_until_the_input_changes(
    tmp_path: Path,
) -> None:
    lines = ("a,1,2013-01-01T00:00:01Z", "before,1,2013-01-01T00:00:00Z")
    url = csv(tmp_path, *lines)
    source_of(tmp_path, url)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "work").iterdir()}
    source_of(tmp_path, url)
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "work").iterdir()}
    csv(tmp_path, *lines, "b,1,2013-01-01T00:00:02Z")
    assert values_of_k(source_of(tmp_path, url), 0) == ["before", "a", "b"]
    names = {p.name for p in (tmp_path / "work").iterdir()}
    assert len(names) == 2
    assert not names & before.keys()


def test_leftovers_of_a_killed_preparation_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = csv(tmp_path, "a,1,2013-01-01T00:00:01Z", "before,1,2013-01-01T00:00:00Z")
    work = tmp_path / "work"

    def killed(*args: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(files_preparation, "order_input", killed)
        patch.setattr(Path, "unlink", lambda *args, **options: None)  # SIGKILL runs no cleanup
        with pytest.raises(SystemExit):
            source_of(tmp_path, url)
    left = {*work.iterdir()}
    assert {path.suffix for path in left} == {".keys", ".stage"}
    another = work / min(left).name.replace("id-s", "id-other")
    another.write_bytes(b"")
    seen: list[Path] = []

    def reading(*args: Any) -> Iterator[pa.RecordBatch]:
        seen.extend(work.iterdir())
        yield from read_batches(*args)

    monkeypatch.setattr(files_preparation, "read_batches", reading)
    source_of(tmp_path, url)
    assert seen
    assert not left & {*seen, *work.iterdir()}
    assert another in work.iterdir()


@pytest.mark.parametrize("name", ["in-1.csv", "in-2.csv"])
@pytest.mark.parametrize("reader", ["read_batches", "scan_blocks"])
def test_an_input_that_grows_during_a_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, name: str
) -> None:
    csv(tmp_path, "a,1,2013-01-01", name="in-1.csv")
    read = getattr(files_preparation, reader)

    def growing(*args: Any) -> Iterator[pa.RecordBatch]:
        yield from read(*args)
        csv(tmp_path, "a,1,2013-01-01", "b,1,2013-01-01", name=name)

    monkeypatch.setattr(files_preparation, reader, growing)
    if reader == "read_batches":
        monkeypatch.setattr(files_preparation, "_index_in_place", lambda *_: None)
    with pytest.raises(SourceFailed, match=f"{name} changed while it was read"):
        source_of(tmp_path, f"file://{tmp_path}/in-*.csv")
    assert not list((tmp_path / "work").iterdir())
    monkeypatch.undo()
    whole = source_of(tmp_path, f"file://{tmp_path}/in-*.csv")
    assert values_of_k(whole, 0) == (["a", "b"] if name == "in-1.csv" else ["a", "a", "b"])


def test_cuts_are_pure_and_together_are_the_sorted_input(tmp_path: Path) -> None:
    rng = random.Random(7)
    offsets = [rng.randrange(0, 40 * 3600) for _ in range(2000)]
    lines = [
        f"{i},{rng.random()},{(T0 + dt.timedelta(seconds=s)).isoformat()}"
        for i, s in enumerate(offsets)
    ]
    source = source_of(tmp_path, csv(tmp_path, *lines))
    last = source.last_epoch
    forward = [source.cut(e) for e in range(last + 3)]
    shuffled = list(range(last + 3))
    rng.shuffle(shuffled)
    for epoch in shuffled:
        again = source.cut(epoch)
        assert again.rows.equals(forward[epoch].rows)
        assert again.watermark == forward[epoch].watermark
    whole = pa.concat_tables(c.rows for c in forward).column("k").to_pylist()
    assert whole == [str(i) for i in sorted(range(2000), key=lambda i: offsets[i])]
    assert all(a.watermark <= b.watermark for a, b in itertools.pairwise(forward))


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_rows_that_are_not_verified_are_the_same(tmp_path: Path, format: str) -> None:
    table = pa.table({"k": ["a", "b"], "v": [1.0, 2.0], "t": [T0, T0 + dt.timedelta(hours=2)]})
    url = csv(tmp_path, f"a,1,{T0.isoformat()}", f"b,2,{T0 + dt.timedelta(hours=2)}")
    if format == "parquet":
        pq.write_table(table.cast(SCHEMA), tmp_path / "in.parquet")
        url = f"file://{tmp_path}/in.parquet"
    one = source_of(tmp_path, url, format=format)
    other = source_of(tmp_path, url, verifies_checksums=False, format=format)
    assert one.last_epoch == other.last_epoch == 2
    assert [one.cut(epoch) for epoch in range(4)] == [other.cut(epoch) for epoch in range(4)]
    assert one.input_files
    assert not other.input_files, "no digests: nothing compares them"


def test_a_watermark_is_unknown_before_any_event_time(tmp_path: Path) -> None:
    url = csv(tmp_path, "a,1,NA", "b,1,2013-01-01")
    source = source_of(tmp_path, url, speedup=None, rowsPerSecond=1, orderBy=None)
    assert [source.cut(e).watermark for e in range(3)] == [NO_WATERMARK, T0_US, END_OF_INPUT]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_an_unverified_input_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, format: str
) -> None:
    url = csv(tmp_path, *(f"{n},1,{T0 + n * dt.timedelta(hours=1)}" for n in range(3)))
    if format == "parquet":
        times = [T0 + n * dt.timedelta(hours=1) for n in range(3)]
        table = pa.table({"k": ["0", "1", "2"], "v": [1.0] * 3, "t": times})
        pq.write_table(table.cast(SCHEMA), tmp_path / "in.parquet")
        url = f"file://{tmp_path}/in.parquet"
    source = source_of(tmp_path, url, verifies_checksums=False, format=format)
    assert values_of_k(source, 0) == ["0"]
    os.utime(url.removeprefix("file://"), ns=(0, 0))
    assert values_of_k(source, 1) == ["1"]
    with pytest.raises(SourceFailed, match="changed while it was read"):
        source.cut(2)
