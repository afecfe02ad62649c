"""The files sink writes each epoch once, for any writer; comparing reports differences."""

from __future__ import annotations

import datetime as dt
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rekindle.connectors.compare import compare_sinks, read_sink
from rekindle.connectors.files_sink import FilesSink, encode, file_name, parse_name
from rekindle.connectors.json_lines import json_line
from rekindle.connectors.registry import open_sink
from rekindle.connectors.sink import Sink
from rekindle.errors import SchemaMismatch, SinkRefused
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.topology.spec import QuerySpec

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.string()), ("x", pa.float64()), ("at", UTC)])
AT = dt.datetime(2013, 1, 1, 6, tzinfo=dt.UTC)


def query(url: str, format: str = "parquet") -> QuerySpec:
    sink = {"files": {"url": url, "format": format}}
    return QuerySpec.model_validate({"name": "q", "from": "s", "sink": sink})


def rows(*keys: str, x: float = 0.1) -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "x": x, "at": AT} for k in keys], SCHEMA)


def batch(epoch: int, table: pa.Table, kind: BatchKind = BatchKind.STABLE) -> EpochBatch:
    return EpochBatch("s", 0, epoch, 0, table, "", kind)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/o" if request.param == "file" else f"memory://{uuid.uuid4().hex}/o"


def sink_at(url: str, format: str = "parquet", partition: int = 0, uid: str = "uid") -> Sink:
    return open_sink("q", query(url, format).sink, partition, uid, SCHEMA)


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_an_epoch_is_written_once_and_listed_as_the_last(url: str, format: str) -> None:
    sink = sink_at(url, format)
    assert sink.last_epoch() == NO_EPOCH
    assert sink.write(batch(3, rows("a", "b")))
    assert not sink.write(batch(3, rows("c")))
    assert not sink.write(batch(4, rows()))
    assert sink.write(batch(12, rows("d")))
    assert sink_at(url, format).last_epoch() == 12
    assert sink_at(url, format, partition=1).last_epoch() == NO_EPOCH
    got = read_sink(query(url, format))
    assert got.column("_epoch").to_pylist() == [3, 3, 12]
    assert got.column("k").to_pylist() == ["a", "b", "d"]


def test_queries_may_share_a_url_if_one_name_is_a_prefix(url: str) -> None:
    one = open_sink("q", query(url).sink, 0, "uid", SCHEMA)
    other = open_sink("q-p000-e000000000009.x", query(url).sink, 0, "uid", SCHEMA)
    assert other.write(batch(5, rows("a")))
    assert one.last_epoch() == NO_EPOCH


def test_another_topology_is_refused(url: str) -> None:
    sink_at(url, uid="first")
    with pytest.raises(SinkRefused, match=r"belongs to the topology with uid first, not second"):
        sink_at(url, uid="second")


def test_a_foreign_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_rekindle.json").write_text("[]")
    with pytest.raises(SinkRefused, match="was not written by Rekindle"):
        sink_at(f"file://{tmp_path}")


def test_a_store_that_ignores_the_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}/o"
    sink_at(url, uid="first")
    create = MemoryFileSystem.pipe_file

    def replace(self: MemoryFileSystem, path: str, value: bytes, mode: str = "create") -> None:
        create(self, path, value, mode="overwrite")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "pipe_file", replace)
        for uid in ("first", "second"):
            with pytest.raises(SinkRefused, match=r"query q: the sink memory://.* it replaced"):
                sink_at(url, uid=uid)
    sink_at(url, uid="first")


def test_tentative_rows_do_not_reach_a_sink(url: str) -> None:
    with pytest.raises(ValueError, match="stable epochs only"):
        sink_at(url).write(batch(1, rows("a"), BatchKind.TENTATIVE))


def test_unsupported_sinks_are_refused() -> None:
    with pytest.raises(SinkRefused, match="ftp:// cannot create"):
        sink_at("ftp://host/x")


def test_replicas_that_race_write_one_file_that_readers_see_whole(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/o"
    sinks = [sink_at(url) for _ in range(8)]
    content = rows(*(str(i) for i in range(5000)))
    done, torn = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            for path in (tmp_path / "o").glob("*.parquet"):
                if pq.read_table(path).num_rows != 5000:
                    torn.append(path)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            for epoch in range(10):
                wrote = list(pool.map(lambda s, e=epoch: s.write(batch(e, content)), sinks))
                assert sum(wrote) == 1
    finally:
        done.set()
        reader.join()
    assert not torn
    names = sorted(p.name for p in (tmp_path / "o").iterdir())
    assert names.pop(0) == ".tmp"
    assert names == ["_rekindle.json", *(file_name("q", 0, e, "parquet") for e in range(10))]


def test_a_sink_without_its_directory_fails_until_it_is_back(tmp_path: Path) -> None:
    sink = sink_at(f"file://{tmp_path}/o")
    (tmp_path / "o").rename(tmp_path / "away")
    with pytest.raises(SinkRefused, match=r"cannot write epoch 1.*is gone"):
        sink.write(batch(1, rows("a")))
    (tmp_path / "away").rename(tmp_path / "o")
    assert sink.write(batch(1, rows("a")))


def test_files_have_the_same_bytes_for_the_same_rows_however_they_are_chunked() -> None:
    whole, parts = rows("a", "b"), pa.concat_tables([rows("a"), rows("b")])
    for format in ("parquet", "json"):
        assert encode(whole, format) == encode(parts, format)


def test_json_lines_are_exact() -> None:
    schema = pa.schema(
        [("x", pa.float64()), ("at", UTC), ("d", pa.decimal128(9, 2)), ("l", pa.list_(pa.date32()))]
    )
    values: list[dict[str, Any]] = [
        {"x": 0.1 + 0.2, "at": AT, "d": None, "l": [dt.date(2013, 1, 1), None]},
        {"x": float("nan"), "at": AT.replace(microsecond=5), "d": 3, "l": None},
        {"x": float("-inf"), "at": None, "d": None, "l": []},
    ]
    lines = encode(pa.Table.from_pylist(values, schema), "json").decode().splitlines()
    assert lines[0] == (
        '{"x":0.30000000000000004,"at":"2013-01-01T06:00:00Z","d":null,"l":["2013-01-01",null]}'
    )
    assert lines[1].startswith('{"x":"NaN","at":"2013-01-01T06:00:00.000005Z","d":"3.00"')
    assert json.loads(lines[2])["x"] == "-Infinity"


def micros(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int64()).cast(UTC)


def test_json_times_are_not_bound_to_pythons_years() -> None:
    at = micros(0, -1, 253402300800000000, -62135596800000001, 2**62, None)
    day = pa.array([0, -719162, 2932897, -719529, 2**31 - 1, None], pa.int32()).cast(pa.date32())
    lines = [
        json.loads(line) for line in encode(pa.table([at, day], ["t", "d"]), "json").splitlines()
    ]
    assert [line["t"] for line in lines] == [
        "1970-01-01T00:00:00Z",
        "1969-12-31T23:59:59.999999Z",
        "10000-01-01T00:00:00Z",
        "0000-12-31T23:59:59.999999Z",
        "148108-07-06T14:00:27.387904Z",
        None,
    ]
    assert [line["d"] for line in lines] == [
        "1970-01-01",
        "0001-01-01",
        "10000-01-01",
        "-0001-12-31",
        "5881580-07-11",
        None,
    ]


def test_nested_json_equals_pythons_json() -> None:
    deep = pa.struct([("t", pa.timestamp("us")), ("l", pa.list_(UTC)), ("b", pa.binary())])
    schema = pa.schema([("s", deep), ("m", pa.map_(pa.string(), pa.date32())), ("n", pa.int32())])
    value = {"t": AT.replace(tzinfo=None), "l": [AT, None], "b": b"xyz"}
    values: list[dict[str, Any]] = [
        {"s": value, "m": [("a", dt.date(2013, 1, 1)), ("b", None)], "n": 1},
        {"s": None, "m": None, "n": None},
        {"s": {"t": None, "l": None, "b": None}, "m": [], "n": 3},
    ]
    table = pa.Table.from_pylist(values, schema)
    assert encode(table, "json").decode().splitlines() == [json_line(r) for r in table.to_pylist()]
    assert encode(table.slice(1), "json") == b"".join(encode(table, "json").splitlines(True)[1:])


def test_json_texts_that_are_not_utf8_are_replaced() -> None:
    raw = pa.array([b"a\xffb", None, "\u00e4".encode()], pa.binary())
    texts = pa.StringArray.from_buffers(3, *raw.buffers()[1:], raw.buffers()[0])
    lines = encode(pa.table({"k": texts}), "json").decode().splitlines()
    assert lines == ['{"k":"a\ufffdb"}', '{"k":null}', '{"k":"\u00e4"}']


def test_unencodable_rows_are_refused_by_column(tmp_path: Path) -> None:
    sink = sink_at(f"file://{tmp_path}/o", "json")
    impossible = rows("a").set_column(2, "at", micros(-(2**63)))
    with pytest.raises(SinkRefused, match="cannot store the rows of epoch 4: column at"):
        sink.write(batch(4, impossible))
    with pytest.raises(SinkRefused, match="cannot store the rows of epoch 4"):
        sink.write(batch(4, rows("a").set_column(1, "x", pa.array([[1]]))))


def test_json_is_read_back_in_the_types_of_a_schema(url: str) -> None:
    table = pa.concat_tables([rows("a", x=float("nan")), rows("b", x=float("-inf")), rows("c")])
    place = fill(url, "json", {1: table})
    got = read_sink(place, schema=SCHEMA).drop_columns(["_query", "_partition", "_epoch"])
    assert got.schema == SCHEMA
    assert repr(got.to_pylist()) == repr(table.to_pylist())


@pytest.mark.parametrize("line", ["null", "1", "[]"])
def test_json_lines_without_an_object_are_not_read_back(tmp_path: Path, line: str) -> None:
    place = fill(f"file://{tmp_path}/o", "json", {1: rows("a")})
    (tmp_path / "o" / file_name("q", 0, 2, "json")).write_text(f"{line}\n")
    for schema in (None, SCHEMA):
        with pytest.raises((ValueError, SchemaMismatch), match="instead of an object"):
            read_sink(place, schema=schema)


def test_names_parse() -> None:
    assert parse_name(file_name("a-p1", 12, 345, "json")) == ("a-p1", 12, 345)
    assert parse_name("_rekindle.json") is None
    assert parse_name("q-p000-e12.parquet") is None


def fill(url: str, format: str, epochs: dict[int, pa.Table]) -> QuerySpec:
    sink = sink_at(url, format)
    for epoch, table in epochs.items():
        sink.write(batch(epoch, table))
    return query(url, format)


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_comparing_counts_lost_repeated_and_differing_rows(tmp_path: Path, format: str) -> None:
    expected = fill(f"file://{tmp_path}/e", format, {1: rows("a", "b"), 2: rows("c", "d")})
    same = fill(f"file://{tmp_path}/s", format, {1: rows("a", "b"), 2: rows("c", "d")})
    assert not compare_sinks(expected, same)
    assert str(compare_sinks(expected, same)) == "identical: 4 rows"
    lost = compare_sinks(expected, fill(f"file://{tmp_path}/l", format, {1: rows("a", "b")}))
    assert (lost.lost, lost.repeated, lost.differing, lost.files) == (2, 0, 0, (("q", 0, 2),))
    again = {1: rows("a", "b"), 2: rows("c", "d"), 3: rows("a")}
    repeated = compare_sinks(expected, fill(f"file://{tmp_path}/r", format, again))
    assert (repeated.lost, repeated.repeated, repeated.differing) == (0, 1, 0)
    assert "epoch 3: again" in str(repeated)
    changed = {1: rows("a", "b"), 2: pa.concat_tables([rows("c", x=0.2), rows("d")])}
    differing = compare_sinks(expected, fill(f"file://{tmp_path}/d", format, changed))
    assert (differing.lost, differing.repeated, differing.differing) == (0, 0, 1)
    swapped = {1: rows("b", "a"), 2: rows("c", "d")}
    order = compare_sinks(expected, fill(f"file://{tmp_path}/o", format, swapped))
    assert (order.lost, order.repeated, order.differing) == (0, 0, 2)
    assert not compare_sinks(expected, f"file://{tmp_path}/l", until_epoch=1)
    assert compare_sinks(f"file://{tmp_path}/e", f"file://{tmp_path}/l")
    with pytest.raises(ValueError, match="no Rekindle output"):
        compare_sinks(f"file://{tmp_path}/nothing", expected)


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_texts_with_any_line_break_are_compared(tmp_path: Path, format: str) -> None:
    breaks = [f"a{b}b" for b in ("\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029")]
    expected = fill(f"file://{tmp_path}/e", format, {1: rows(*breaks)})
    same = fill(f"file://{tmp_path}/s", format, {1: rows(*breaks)})
    assert str(compare_sinks(expected, same)) == "identical: 8 rows"
    other = fill(f"file://{tmp_path}/o", format, {1: rows(*breaks[:-1], "ab")})
    assert compare_sinks(expected, other).differing == 1


def test_an_empty_directory_has_no_rows(tmp_path: Path) -> None:
    sink = sink_at(f"file://{tmp_path}/o")
    assert isinstance(sink, FilesSink)
    assert read_sink(query(f"file://{tmp_path}/o")).num_rows == 0


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_file_with_different_rows_is_named(url: str, format: str) -> None:
    mine, yours = sink_at(url, format), sink_at(url, format)
    yours.write(batch(3, rows("wrong")))
    assert not mine.write(batch(3, rows("right")))
    assert mine.conflict is not None
    assert f"q-p000-e000000000003.{'parquet' if format == 'parquet' else 'jsonl'}" in mine.conflict


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_file_with_the_same_rows_is_no_conflict(url: str, format: str) -> None:
    mine, yours = sink_at(url, format), sink_at(url, format)
    yours.write(batch(3, rows("a", "b")))
    assert not mine.write(batch(3, pa.concat_tables([rows("a"), rows("b")])))
    assert mine.conflict is None


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_the_sign_of_zero_is_no_conflict(url: str, format: str) -> None:
    mine, yours = sink_at(url, format), sink_at(url, format)
    assert digest_table(rows("a", x=-0.0)) == digest_table(rows("a", x=0.0))
    yours.write(batch(3, rows("a", x=-0.0)))
    assert not mine.write(batch(3, rows("a", x=0.0)))
    assert mine.conflict is None


def test_a_file_of_an_older_release_with_negative_zero_is_no_conflict(tmp_path: Path) -> None:
    sink = sink_at(f"file://{tmp_path}/o", "json")
    sink.write(batch(3, rows("a", x=0.0)))
    (path,) = (tmp_path / "o").glob("*.jsonl")
    path.write_text(path.read_text().replace('"x":0.0', '"x":-0.0'))
    assert not sink.write(batch(3, rows("a", x=0.0)))
    assert sink.conflict is None


def test_comparing_does_not_see_the_sign_of_zero(tmp_path: Path) -> None:
    one = fill(f"file://{tmp_path}/e", "parquet", {1: rows("a", x=-0.0)})
    other = fill(f"file://{tmp_path}/f", "parquet", {1: rows("a", x=0.0)})
    assert not compare_sinks(one, other)


def sink_in_conflict(url: str, *epochs: int) -> Sink:
    """The files of these epochs have other rows than the sink would write."""
    sink = sink_at(url)
    for epoch in epochs:
        sink_at(url).write(batch(epoch, rows("wrong")))
        sink.write(batch(epoch, rows("right")))
    return sink


def any_epoch(epoch: int) -> bool:
    return True


def test_a_wrong_file_that_is_deleted_is_written_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/o"
    sink = sink_in_conflict(url, 3)
    sink.retry_conflicts(any_epoch)
    assert "delete it" in str(sink.conflict), "it is still there"
    (tmp_path / "o" / file_name("q", 0, 3, "parquet")).unlink()
    sink.retry_conflicts(lambda epoch: epoch > 3)
    assert sink.conflict is not None, "replicas disagree: the epoch must not be written"
    sink.retry_conflicts(any_epoch)
    assert sink.conflict is None
    assert read_sink(query(url))["k"].to_pylist() == ["right"]


def test_a_corrected_file_is_no_conflict_any_more(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/o"
    sink = sink_in_conflict(url, 3)
    (tmp_path / "o" / file_name("q", 0, 3, "parquet")).unlink()
    sink_at(url).write(batch(3, rows("right")))
    sink.retry_conflicts(any_epoch)
    assert sink.conflict is None


def test_several_wrong_files_are_separate_conflicts(tmp_path: Path) -> None:
    sink = sink_in_conflict(f"file://{tmp_path}/o", 3, 4)
    assert "(and 1 more)" in str(sink.conflict)
    (tmp_path / "o" / file_name("q", 0, 3, "parquet")).unlink()
    sink.retry_conflicts(any_epoch)
    assert file_name("q", 0, 4, "parquet") in str(sink.conflict)


def test_bytes_kept_for_wrong_files_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.connectors.files_sink.KEPT_BYTES", 10)
    sink = sink_in_conflict(f"file://{tmp_path}/o", 3)
    assert "does not keep its rows any more" in str(sink.conflict)
    sink.retry_conflicts(any_epoch)
    assert sink.conflict is not None


def test_the_number_of_rechecked_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.connectors.files_sink.KEPT_FILES", 2)
    sink = sink_in_conflict(f"file://{tmp_path}/o", 3, 4, 5, 6)
    assert "(and 3 more)" in str(sink.conflict)
    for epoch in (3, 4, 5, 6):
        (tmp_path / "o" / file_name("q", 0, epoch, "parquet")).unlink()
    sink.retry_conflicts(any_epoch)
    written = {path.name for path in (tmp_path / "o").glob("*.parquet")}
    assert written == {file_name("q", 0, epoch, "parquet") for epoch in (3, 4)}
    assert file_name("q", 0, 5, "parquet") in str(sink.conflict)


def test_the_error_of_a_directory_that_cannot_be_opened_has_no_number(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SinkRefused, match=r"file/out cannot be opened: Not a directory; check the"):
        sink_at(f"file://{tmp_path}/file/out")
