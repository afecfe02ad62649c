"""CSV and JSON in order are cut where they are, with the rows of a copy."""

from __future__ import annotations

import datetime as dt
import gzip
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from files_source_parts import T0, csv, source_of, values_of_k
from fsspec.implementations.local import LocalFileOpener
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors import files_preparation, files_read, text_in_place
from rekindle.connectors.csv_reading import parse_csv_block
from rekindle.connectors.line_blocks import digest_of
from rekindle.errors import SourceFailed

BOM = b"\xef\xbb\xbf"
KV_SCHEMA = pa.schema([("k", pa.string()), ("v", pa.float64())])
BY_COUNT: dict[str, Any] = {"orderBy": None, "speedup": None, "rowsPerSecond": 2}


def suffixes(tmp: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp / "work").iterdir())


def in_order(tmp: Path, rows: int, name: str = "in.csv", first: int = 0) -> str:
    """Rows ten minutes apart: six in an epoch."""
    lines = (
        f"k{n},{n}.5,{(T0 + n * dt.timedelta(minutes=10)).isoformat()}"
        for n in range(first, first + rows)
    )
    return csv(tmp, *lines, name=name)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_in_place, "BLOCK_BYTES", 100)


@pytest.mark.usefixtures("small_blocks")
def test_ordered_csv_is_not_copied(tmp_path: Path) -> None:
    in_order(tmp_path, 20, "0.csv")
    in_order(tmp_path, 10, "1.csv", first=20)
    source = source_of(tmp_path, f"file://{tmp_path}/?.csv")
    assert suffixes(tmp_path) == [".index"]
    assert [values_of_k(source, n) for n in range(6)] == [
        [f"k{n}" for n in range(6 * epoch, min(6 * epoch + 6, 30))] for epoch in range(6)
    ]
    assert source.summary.rows == 30


@pytest.mark.usefixtures("small_blocks")
def test_a_restart_reads_from_the_block_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = in_order(tmp_path, 60)
    source_of(tmp_path, url)
    parsed: list[int] = []

    def counting(block: bytes, *args: Any) -> pa.RecordBatch:
        parsed.append(len(block))
        return parse_csv_block(block, *args)

    monkeypatch.setattr(text_in_place, "parse_csv_block", counting)
    again = source_of(tmp_path, url)
    assert not parsed
    assert values_of_k(again, 7) == [f"k{n}" for n in range(42, 48)]
    assert len(parsed) <= 4
    assert sum(parsed) < 500 < (tmp_path / "in.csv").stat().st_size
    parsed.clear()
    for epoch in range(10):
        again.cut(epoch)
        again.cut(epoch)
    blocks = parsed[:]
    assert sum(blocks) == (tmp_path / "in.csv").stat().st_size - len("k,v,t\n")


@pytest.mark.usefixtures("small_blocks")
def test_a_partition_reads_blocks_of_its_own_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(4):
        in_order(tmp_path, 10, f"{n}.csv", first=10 * n)
    url = f"file://{tmp_path}/?.csv"
    parts = [source_of(tmp_path, url, partition=(n, 2)) for n in range(2)]
    assert suffixes(tmp_path) == [".index"] * 2
    found = [[key for epoch in range(7) for key in values_of_k(part, epoch)] for part in parts]
    first, second = ([*range(0, 10), *range(20, 30)], [*range(10, 20), *range(30, 40)])
    assert found == [[f"k{n}" for n in first], [f"k{n}" for n in second]]
    (tmp_path / "1.csv").unlink()
    assert values_of_k(parts[0], 4) == [f"k{n}" for n in range(24, 30)]
    with pytest.raises(SourceFailed, match="check that its store can be reached"):
        parts[1].cut(2)


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"k20,20.5", b"k20,20.6"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def insert(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"k,v,t\n", b"k,v,t\nnew,1,2013-01-01T00:00:00\n"))


@pytest.mark.parametrize("edit", [change, truncate, insert])
@pytest.mark.usefixtures("small_blocks")
def test_a_file_that_changes_under_an_open_source_is_found(
    tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    path = tmp_path / "in.csv"
    source = source_of(tmp_path, in_order(tmp_path, 24))
    assert values_of_k(source, 0) == [f"k{n}" for n in range(6)]
    before = path.read_bytes()
    edit(path)
    source.close()  # it forgets what it has read ahead, which would be right
    with pytest.raises(SourceFailed, match=r"in\.csv changed"):
        source.cut(3)
    path.write_bytes(before)
    again = source_of(tmp_path, f"file://{path}")
    assert values_of_k(again, 3) == [f"k{n}" for n in range(18, 24)]


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_a_file_that_changed_unnoticed_are_never_cut(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    source = source_of(tmp_path, in_order(tmp_path, 24))
    times = path.stat()
    change(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(SourceFailed, match="the input files have changed since they were"):
            source.cut(3)


@pytest.mark.usefixtures("small_blocks")
def test_what_a_disk_returns_wrongly_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(tmp_path, in_order(tmp_path, 24))
    calls = itertools.count()
    monkeypatch.setattr(
        text_in_place, "digest_of", lambda data: "bad" if not next(calls) else digest_of(data)
    )
    assert values_of_k(source, 3) == [f"k{n}" for n in range(18, 24)]


def test_a_cut_is_repeated_when_the_store_is_back(tmp_path: Path) -> None:
    source = source_of(tmp_path, in_order(tmp_path, 24))
    (tmp_path / "in.csv").rename(tmp_path / "away")
    with pytest.raises(SourceFailed, match="check that its store can be reached"):
        source.cut(2)
    (tmp_path / "away").rename(tmp_path / "in.csv")
    assert values_of_k(source, 2) == [f"k{n}" for n in range(12, 18)]


def test_an_index_whose_blocks_are_damaged_is_prepared_again(tmp_path: Path) -> None:
    url = in_order(tmp_path, 24)
    source_of(tmp_path, url)
    (path,) = (tmp_path / "work").iterdir()
    raw = path.read_bytes()
    # The file's blocks, in JSON: the first one begins after the header, at byte 6.
    path.write_bytes(raw.replace(b"[0,24,0,[[6,", b"[0,24,0,[[7,"))
    assert path.read_bytes() != raw
    assert values_of_k(source_of(tmp_path, url), 3) == [f"k{n}" for n in range(18, 24)]
    assert path.read_bytes() == raw


def test_files_of_a_store_without_range_reads_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, place: int, *args: Any) -> int:
        raise ValueError("Cannot seek streaming HTTP file")

    monkeypatch.setattr(LocalFileOpener, "seek", refuse)
    source_of(tmp_path, in_order(tmp_path, 24))
    assert suffixes(tmp_path) == [".arrow", ".index"]


def test_input_that_becomes_ordered_leaves_no_copy(tmp_path: Path) -> None:
    url = csv(tmp_path, "a,1,2013-01-02", "b,1,2013-01-01")
    source_of(tmp_path, url)
    assert suffixes(tmp_path) == [".arrow", ".index"]
    source_of(tmp_path, in_order(tmp_path, 3))
    assert suffixes(tmp_path) == [".index"]


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("in.csv", b'k,v\n"a\nb",1\n', {}),
        ("in.csv", b'k,"v\nw",v\na,b,1\n', {}),
        ("in.csv", b"k,v\na\\,b,1\n", {"escape": "\\"}),
        ("in.csv", b"k,v\ra,1\r", {}),
        ("in.csv", b"k,v\na,1\rb,2\n", {}),
        ("in.csv", "k,v\nä,1\n".encode("latin-1"), {"encoding": "ISO-8859-1"}),
        ("in.csv", b"k,v\na,1\n", {"encoding": "US-ASCII"}),
        ("in.csv.gz", gzip.compress(b"k,v\na,1\n", mtime=0), {}),
        ("in.json.gz", gzip.compress(b'{"k": "a", "v": 1}', mtime=0), {}),
        ("in.csv", b"k,v\n" + b"a" * 1000 + b",1\n", {}),
        ("in.json", b'{"k": "' + b"a" * 1000 + b'", "v": 1}\n', {}),
        ("in.csv", b"k,v\nb,1\na,2\n", {"orderBy": "k"}),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_what_has_no_blocks_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(files_preparation, "MAX_IN_PLACE_BYTES", 500)
    (tmp_path / name).write_bytes(data)
    given = {"format": name.split(".")[1], **BY_COUNT, **options}
    source = source_of(tmp_path, f"file://{tmp_path}/{name}", KV_SCHEMA, **given)
    assert suffixes(tmp_path) == [".arrow", ".index"]
    assert source.cut(0).rows.num_rows


@pytest.mark.parametrize(
    ("name", "data", "rows", "options"),
    [
        ("in.csv", b"k,v\na,1", [("a", 1)], {}),
        ("in.csv", b"k,v\r\na,1\r\n\r\nb,2", [("a", 1), ("b", 2)], {}),
        ("in.csv", b"\n\nk,v\n\na,1\n\n", [("a", 1)], {}),
        ("in.csv", b"\r\n\nk,x,v\r\na,,1\n\n\nb,,\n", [("a", 1), ("b", None)], {}),
        ("in.csv", BOM + b"k,v\na,1\n", [("a", 1)], {}),
        ("in.csv", BOM + b"a,1\nb,2", [("a", 1), ("b", 2)], {"header": False}),
        ("in.csv", b"a,1", [("a", 1)], {"header": False}),
        ("in.csv", b"k,v\n", [], {}),
        ("in.csv", b"k,v", [], {}),
        ("in.csv", b"\nk,v\n\n\n", [], {}),
        ("in.csv", b"", [], {"header": False}),
        ("in.csv", b"\n\n", [], {"header": False}),
        ("in.csv", b"v,k\n1,a\n", [("a", 1)], {}),
        ("in.csv", b"v,,k,\n1,x,a,\n", [("a", 1)], {}),
        ("in.csv", b'"k","v"\n"a,""b""",1\n"",2\n"NA",', [('a,"b"', 1), ("", 2), ("NA", None)], {}),
        ("in.csv", b"'k','v'\r\n'a\"','1'", [('a"', 1)], {"quote": "'"}),
        ("in.csv", b"k,v\nNA,NA\n,\n", [(None, None), ("", None)], {}),
        ("in.csv", b"k,v\nNA,1\n,\n", [("NA", 1), (None, None)], {"nullValue": ""}),
        ("in.csv", b'k,v\n"a",1\n', [('"a"', 1)], {"quote": ""}),
        ("in.csv", b"k\tv\na,b\t1\n", [("a,b", 1)], {"delimiter": "\\t"}),
        ("in.csv", "k,v\nä\u2028ß,1\n".encode(), [("ä\u2028ß", 1)], {}),
        ("in.csv", b"k,v\na\x00b,1\n", [("a\x00b", 1)], {}),
        ("in.json", b'{"k": "a", "v": 1}', [("a", 1)], {}),
        ("in.json", BOM + b'{"k": "a", "v": 1}\r\n\r\n{"k": "b"}', [("a", 1), ("b", None)], {}),
        ("in.json", b'{"v": null, "k": "a"}\n', [("a", None)], {}),
        ("in.json", b'{"v": 1, "k": "a"} {"k": "b"}\n\n', [("a", 1), ("b", None)], {}),
        ("in.json", b"", [], {}),
        ("in.json", b"\n \n", [], {}),
    ],
)
def test_lines_of_any_form_are_read_in_place_as_from_a_copy(
    tmp_path: Path, name: str, data: bytes, rows: list[tuple[str, float]], options: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(data)
    given = {"format": name.split(".")[1], **BY_COUNT, **options}
    for block_bytes in (1, 1 << 20):
        place = tmp_path / f"{block_bytes}"
        place.mkdir()
        in_place, *others = outcomes(place, f"file://{tmp_path}/{name}", block_bytes, given)
        assert isinstance(in_place, list)
        assert [(r["k"], r["v"]) for of_epoch, _ in in_place for r in of_epoch] == rows
        assert others == [in_place, in_place]
        assert suffixes(place) == [".index"]


Cuts = list[tuple[list[dict[str, Any]], int]]


def outcomes(
    tmp: Path, url: str, block_bytes: int, options: dict[str, Any], seed: int = 0
) -> list[Cuts | str]:
    """What is read in place, from a copy, and in place by a process that begins anywhere: the cuts
    of all epochs, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_in_place, "BLOCK_BYTES", block_bytes)
        if options["format"] == "json":
            patch.setattr(files_read, "BLOCK_BYTES", block_bytes)
        in_place = outcome(tmp, url, options)
        patch.setattr(files_preparation, "_index_in_place", lambda *_: None)
        copied = outcome(tmp / "copy", url, options)
    return [in_place, copied, outcome(tmp, url, options, seed)]


def outcome(tmp: Path, url: str, options: dict[str, Any], seed: int | None = None) -> Cuts | str:
    tmp.mkdir(exist_ok=True)
    try:
        source = source_of(tmp, url, options.get("schema", KV_SCHEMA), **without_schema(options))
    except SourceFailed as e:
        return str(e)
    epochs = list(range(source.last_epoch + 2))
    if seed is not None:
        random.Random(seed).shuffle(epochs)
    cuts = {epoch: source.cut(epoch) for epoch in epochs}
    return [(cut.rows.to_pylist(), cut.watermark) for _, cut in sorted(cuts.items())]


def without_schema(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "schema"}


_K = st.sampled_from([b"a", b"b", b"", b"NA", b" ", "\u00e4\u2028".encode(), b"a b", b"\x00"])
_V = st.sampled_from([b"1", b"2.5", b"", b"NA", b"-0.0", b"nan", b"1e300"])
_STRANGE = st.sampled_from(
    [
        b'""',
        b'"1"',
        b"1",
        b'"a",1',
        b'"NA","1"',
        b'"a""b,",1',
        b'"a\nb",1',
        b'"a\rb",1',
        b'a"b,1',
        b'"a"b,1',
        b'"a,1',
        b' "a",1',
        b"a,1,",
        b"a",
        b",",
        b" ",
        b"\\,1",
        b"a,x",
        b"'a,b',1",
        BOM,
        b"\xff,1",
    ]
)
_END = st.sampled_from([b"\n"] * 8 + [b"\r\n"] * 4 + [b"\n\n", b"\r\n\n", b"\n\r\n", b"\r"])


@st.composite
def csv_files(draw: st.DrawFn) -> bytes:
    usual = [b"k,v", b"v,k", b"x,k,v", b"k,,v", b'"k",v'] * 3
    header = draw(st.sampled_from([*usual, b"v", b"v", b"k,w", b""]))
    lines = []
    for _ in range(draw(st.integers(0, 8))):
        if draw(st.integers(0, 40)) == 0:
            lines.append(draw(_STRANGE))
            continue
        quote = b'"' if draw(st.integers(0, 4)) == 0 else b""
        names = header.split(b",") if header else [b"k", b"v"]
        values = {b"k": quote + draw(_K) + quote, b"v": draw(_V)}
        lines.append(b",".join(values.get(name.strip(b'"'), b"z") for name in names))
    first = [header] if header or draw(st.booleans()) else []
    text = draw(st.sampled_from([b"", b"", b"", BOM, b"\n", b"\r\n", BOM + b"\n"]))
    one_end = draw(st.one_of(st.none(), _END))
    for line in (*first, *lines):
        text += line + (one_end or draw(_END))
    return text.rstrip(b"\r\n") if draw(st.booleans()) else text


@given(
    files=st.lists(csv_files(), min_size=1, max_size=2),
    options=st.sampled_from(
        [
            *({}, {}, {"header": False}, {"nullValue": ""}, {"quote": ""}, {"quote": "'"}),
            *({"escape": "\\"}, {"escape": '"'}, {"orderBy": "k"}, {"orderBy": "v"}),
            {"schema": pa.schema([KV_SCHEMA.field("v")])},
            {"schema": pa.schema([KV_SCHEMA.field("v")]), "header": False},
        ]
    ),
    block_bytes=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_csv_of_any_form_is_read_in_place_as_from_a_copy(
    files: Sequence[bytes], options: dict[str, Any], block_bytes: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        for n, data in enumerate(files):
            Path(name, f"{n}.csv").write_bytes(data)
        given = {"format": "csv", **BY_COUNT, **options}
        in_place, copied, again = outcomes(
            Path(name), f"file://{name}/*.csv", block_bytes, given, seed
        )
        assert repr(in_place) == repr(copied)  # NaN is not equal to itself
        assert repr(again) == repr(copied) or isinstance(copied, str)


_OBJECTS = st.sampled_from(
    [
        *(b'{"k": "a", "v": 1}', b'{"v": 2.5, "k": "b"}', b'{"k": null, "v": 1}', b'{"v": 1}'),
        *(
            b'{"k": "\\u00e4 \\n", "v": null}',
            '{"k": "\u00e4\u2028"}'.encode(),
            b'{"k":"NA","x":{}}',
        ),
        *(
            b'{"k": "a", "v": "NaN"}',
            b'{"k": "a", "v": Infinity}',
            b'{"k": "a", "v": 1e300}',
            b"{}",
        ),
    ]
)
_STRANGE_LINES = st.sampled_from(
    [
        *(b"null", b"[]", b'"a"', b"1", b"x", b'{"k": 1}', b'{"k": "a", "v": true}', b'{"k": "a"'),
        *(
            b'{"k": "a", "k": "b"}',
            b'{"k": "\xff"}',
            b'{"v": 1e400}',
            b'{"k": "} null"}',
            BOM,
            b" ",
        ),
        b'{"k":\n"a"}',
    ]
)


@st.composite
def json_files(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from([b"", b"", b"", BOM, b"\n", b" \r\n"]))
    for _ in range(draw(st.integers(0, 8))):
        strange = draw(st.integers(0, 25)) == 0
        text += draw(_STRANGE_LINES if strange else _OBJECTS)
        text += draw(st.sampled_from([b"\n"] * 6 + [b"\r\n", b"\n\n", b" \n", b" ", b""]))
    return text.rstrip(b"\r\n") if draw(st.booleans()) else text


@given(
    files=st.lists(json_files(), min_size=1, max_size=3),
    options=st.sampled_from([{}, {}, {"orderBy": "k"}, {"orderBy": "v"}]),
    block_bytes=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_json_of_any_form_is_read_in_place_as_from_a_copy(
    files: Sequence[bytes], options: dict[str, Any], block_bytes: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        for n, data in enumerate(files):
            Path(name, f"{n}.json").write_bytes(data)
        given = {"format": "json", **BY_COUNT, **options}
        in_place, copied, again = outcomes(
            Path(name), f"file://{name}/*.json", block_bytes, given, seed
        )
        assert repr(in_place) == repr(copied)  # NaN is not equal to itself
        assert repr(again) == repr(copied) or isinstance(copied, str)
