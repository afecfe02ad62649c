"""Contents of real files: misspelt fields, no rows, too large numbers, duplicate names."""

from __future__ import annotations

import csv
import decimal
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_parts import arrow_schema_of

from rekindle.connectors import csv_reading, files_read, json_reading
from rekindle.connectors.files_read import read_batches
from rekindle.connectors.json_writer import encode_lines
from rekindle.errors import SchemaMismatch
from rekindle.streams.digest import digest_table
from rekindle.topology.kinds.files import FilesSourceSpec


def options(format: str, **fields: Any) -> FilesSourceSpec:
    given = {"url": "file:///in", "format": format, "rowsPerSecond": 1, **fields}
    return FilesSourceSpec.model_validate(given)


def read(path: Path, ddl: str, format: str = "json") -> list[dict[str, Any]]:
    fs = fsspec.filesystem("file")
    schema = arrow_schema_of(ddl)
    batches = [b for _, b in read_batches(fs, str(path), options(format), schema, source="s")]
    return pa.Table.from_batches(batches, schema).to_pylist()  # type: ignore[no-any-return]


def json_file(tmp: Path, *lines: str) -> Path:
    path = tmp / "in.json"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def csv_file(tmp: Path, *lines: str) -> Path:
    path = tmp / "in.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("k BIGINT, s STRUCT<nmae: STRING>", r"a field s\.nmae; the file has .*s\.name"),
        ("s STRUCT<nmae: STRING>", r"did you mean name\?"),
        ("s STRUCT<name: STRING, in: STRUCT<z: INT>>", r"a field s\.in\.z; the file has s\.in\.x"),
        ("l ARRAY<STRUCT<y: INT>>", r"a field l\.y; the file has l\.x"),
    ],
)
def test_a_misspelt_field_of_a_struct_is_refused(tmp_path: Path, ddl: str, message: str) -> None:
    row = {"k": 1, "s": {"name": "a", "in": {"x": 1}}, "l": [{"x": 1}, None]}
    with pytest.raises(SchemaMismatch, match=rf"in\.json.*{message}"):
        read(json_file(tmp_path, json.dumps(row), "{}", '{"s": null}'), ddl)
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "in.parquet")
    message = message.replace("a field", "no field")
    with pytest.raises(SchemaMismatch, match=rf"in\.parquet.*{message}"):
        read(tmp_path / "in.parquet", ddl, "parquet")


def test_a_field_that_some_objects_lack_is_null_there(tmp_path: Path) -> None:
    lines = ['{"s": {"a": 1}}', '{"s": {"b": null, "c": 0}}', '{"s": null}', "{}", '{"s": {}}']
    got = read(json_file(tmp_path, *lines), "s STRUCT<a: INT, b: INT>")
    assert [row["s"] for row in got] == [
        {"a": 1, "b": None},
        {"a": None, "b": None},
        None,
        None,
        {"a": None, "b": None},
    ]


def test_fields_of_a_null_parent_are_not_checked(tmp_path: Path) -> None:
    path = json_file(tmp_path, '{"s": null, "l": []}', '{"s": null, "l": [null]}')
    got = read(path, "s STRUCT<a: STRUCT<b: INT>>, l ARRAY<STRUCT<c: INT>>")
    assert got == [{"s": None, "l": []}, {"s": None, "l": [None]}]


@pytest.mark.parametrize(
    ("ddl", "made"),
    [
        ("x STRING", lambda text: text),
        ("x STRUCT<y: STRING>", lambda text: {"y": text}),
        ("x ARRAY<STRING>", lambda text: [text, text]),
    ],
)
def test_long_texts_that_repeat_come_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ddl: str, made: Callable[[str], Any]
) -> None:
    """A file has each only once, in a dictionary: 65,536 rows of a few KB were one batch."""
    monkeypatch.setattr(files_read, "BATCH_BYTES", 1 << 20)
    schema = arrow_schema_of(ddl)
    rows = [{"x": made("x" * 4000 if n % 5 else "y")} for n in range(2000)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    fs = fsspec.filesystem("file")
    batches = [b for _, b in read_batches(fs, str(path), options("parquet"), schema, source="s")]
    assert pa.Table.from_batches(batches, schema).to_pylist() == rows
    assert max(batch.nbytes for batch in batches) <= 1 << 20
    assert len(batches) < 50


def test_parquet_fields_are_found_by_name(tmp_path: Path) -> None:
    table = pa.table({"l": [[{"b": 1, "a": 2.5, "more": "x"}, None], None, []]})
    pq.write_table(table, tmp_path / "in.parquet")
    got = read(tmp_path / "in.parquet", "l ARRAY<STRUCT<a: DOUBLE, b: INT>>", "parquet")
    assert [row["l"] for row in got] == [[{"a": 2.5, "b": 1}, None], None, []]


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\n", b"\xef\xbb\xbf"])
def test_a_json_file_without_lines_has_no_rows(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(content)
    assert read(path, "k BIGINT, s STRUCT<a: INT>") == []


DOUBLES = {
    "1": 1.0,
    "-2.5e-3": -0.0025,
    '"NaN"': math.nan,
    "NaN": math.nan,
    '"Infinity"': math.inf,
    '"-Infinity"': -math.inf,
    "-Infinity": -math.inf,
    "1e-400": 0.0,
    "null": None,
}


@pytest.mark.parametrize("text", DOUBLES)
def test_doubles_that_json_lacks_are_read(tmp_path: Path, text: str) -> None:
    lines = '{"x": 0.5, "f": [{"y": 1}]}', f'{{"x": {text}, "f": [{{"y": {text}}}]}}'
    (first, second) = read(json_file(tmp_path, *lines), "x DOUBLE, f ARRAY<STRUCT<y: FLOAT>>")
    assert first == {"x": 0.5, "f": [{"y": 1.0}]}
    wanted = DOUBLES[text]
    assert str(second["x"]) == str(wanted)
    assert second["f"][0]["y"] == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("text", ["1.00000005960464477540", "3.4028235677973366e38", "16777217"])
def test_a_float_does_not_depend_on_the_lines_beside_it(tmp_path: Path, text: str) -> None:
    """Python parses a block with a NaN, Arrow one without."""
    (alone,) = read(json_file(tmp_path, f'{{"x": {text}}}'), "x FLOAT")
    (beside, _) = read(json_file(tmp_path, f'{{"x": {text}}}', '{"x": NaN}'), "x FLOAT")
    assert alone == beside


@pytest.mark.parametrize(
    ("ddl", "value", "message"),
    [
        ("x DOUBLE", "1e400", "the number 1e400 is too large for a DOUBLE"),
        ("x DOUBLE", "-" + "9" * 400, "is too large for a DOUBLE"),
        ("x FLOAT", "1e39", "the number 1e39 is too large for a FLOAT"),
        ("x ARRAY<DOUBLE>", "[1, 1e999]", "the number 1e999 is too large"),
        ("x DOUBLE", '"one"', "field x: the string 'one' instead of a number"),
        ("x DOUBLE", "true", "field x: true instead of a number"),
        ("x BIGINT", "1.0", "the number 1.0 instead of a whole number"),
        ("x TINYINT", "128", "the number 128 is not a TINYINT"),
        ("x DECIMAL(5, 2)", "1.005", r"the number 1.005 is not a DECIMAL\(5, 2\)"),
        ("x DECIMAL(5, 2)", "12345", "the number 12345 is not a DECIMAL"),
        ("x DECIMAL(5, 2)", '"NaN"', "the string 'NaN' instead of a number"),
        ("x DECIMAL(5, 2)", '"1_0"', "the string '1_0' instead of a number"),
        ("x STRUCT<y: INT>", "[1]", "field x: an array instead of an object"),
        ("x STRUCT<y: INT>", '{"y": "1"}', r"field x\.y: the string '1' instead of a whole"),
        ("x STRING", "5", "field x: the number 5 instead of a string"),
        ("x BIGINT", '5, "x": 6', "field x occurs twice"),
        ("x BINARY", '"not base64!"', "'not base64!' is not a BINARY"),
    ],
)
def test_a_bad_json_value_is_named_with_its_line(
    tmp_path: Path, ddl: str, value: str, message: str
) -> None:
    path = json_file(tmp_path, '{"x": null}', "", f'{{"x": {value}}}', '{"x": null}')
    # Base64 is decoded after the lines are parsed, when only the row is known.
    place = "row 2" if "BINARY" in ddl else "line 3"
    with pytest.raises(SchemaMismatch, match=rf"(?s)in\.json.*{place}: .*{message}"):
        read(path, ddl)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "an array instead of an object; write one object a line"),
        ("[null]", "an array instead of an object; write one object a line"),
        ("1.5", "the number 1.5 instead of an object; write one object a line"),
        ("NaN", "NaN instead of an object; write one object a line"),
        ("true", "true instead of an object; write one object a line"),
        ('"null"', "the string 'null' instead of an object; write one object a line"),
        ("null", "null instead of an object; write one object a line"),
        (" \t null \r", "null instead of an object; write one object a line"),
        ('{"x": "b"}null', "null instead of an object; write one object a line"),
        ("nullnull", "null instead of an object; write one object a line"),
        ('{"x": 1', "not JSON from character 8 on; correct"),
        ('{"x": "a"} x', "not JSON from character 12 on"),
        ("x", "not JSON from character 1 on; is the source's format another one"),
        ('{"x": "\\ud800"}', "surrogates not allowed"),
        (b'{"x": "\xff"}', "write the file in UTF-8"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(b'{"x": "a"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(SchemaMismatch, match=rf"(?s)in\.json, line 2: .*{message}"):
        read(path, "x STRING")


def test_an_array_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be all of a large file, of which Python objects take forty times as much memory."""
    monkeypatch.setattr(json_reading, "_DECODER", None)
    path = tmp_path / "in.json"
    path.write_text('[{"x": "a"},\n{"x": "b"}]')
    with pytest.raises(SchemaMismatch, match=r"line 1: .*an array instead of an object; write one"):
        read(path, "x STRING", format="json")


def test_a_json_line_above_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text('{"x": "a"}\n{"x": "' + "b" * 100 + '"}\n')
    schema = pa.schema([("x", pa.string())])
    with pytest.raises(SchemaMismatch, match="in, line 2 or later: a line has more than 50 bytes"):
        list(
            json_reading.read_json_blocks(
                lambda: path.open("rb"), schema, block_bytes=16, where="in", max_line_bytes=50
            )
        )


def test_a_csv_file_without_a_line_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_reading, "_MAX_FIRST_LINE_CHARS", 50)
    path = tmp_path / "in.csv"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(SchemaMismatch, match=r"in\.csv: a line at the beginning has more than 50"):
        read(path, "x STRING", format="csv")


@pytest.mark.parametrize("block_bytes", [1, 64, 4 << 20])
@pytest.mark.parametrize("at", [1, 2, 50, 100])
def test_null_instead_of_an_object_is_named_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, block_bytes: int
) -> None:
    """Arrow's reader makes a row of it, or ends the process if no object is before it."""
    monkeypatch.setattr(files_read, "BLOCK_BYTES", block_bytes)
    lines = ['{"x": "a"}'] * 100
    lines[at - 1] = "null"
    with pytest.raises(SchemaMismatch, match=rf"in\.json, line {at}: 'null': null instead of"):
        read(json_file(tmp_path, *lines), "x STRING")


@pytest.mark.parametrize("content", [b"null", b"\n null\n", b"\xef\xbb\xbfnull", b"\r\nnull\r\n"])
def test_a_json_file_of_null_alone_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(content)
    with pytest.raises(SchemaMismatch, match=r"in\.json, line \d: .*null instead of an object"):
        read(path, "x STRING")


def test_null_in_a_text_or_a_field_is_no_line(tmp_path: Path) -> None:
    rows = [{"x": "} null", "l": [{"y": 1}, None]}, {"x": None, "l": None}, {"x": "null", "l": []}]
    path = json_file(tmp_path, *map(json.dumps, rows))
    assert read(path, "x STRING, l ARRAY<STRUCT<y: INT>>") == rows


@pytest.mark.parametrize("text", ["0.1", '"0.1"', "1e-1", "0.10000", '"+0.1"'])
def test_json_decimals_are_exact(tmp_path: Path, text: str) -> None:
    lines = f'{{"d": {text}}}', '{"d": 12345678901234567890123456789012345.678}', '{"d": ""}'
    got = read(json_file(tmp_path, *lines), "d DECIMAL(38, 3)")
    wanted = [decimal.Decimal(d) for d in ("0.100", "12345678901234567890123456789012345.678")]
    assert [row["d"] for row in got] == [*wanted, None]


def test_blocks_end_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [i / 7 if i % 5 else None for i in range(300)]
    path = json_file(tmp_path, *(json.dumps({"i": i, "x": v}) for i, v in enumerate(values)))
    for size in (1, 7, 100, 4096):
        monkeypatch.setattr(files_read, "BLOCK_BYTES", size)
        got = read(path, "i BIGINT, x DOUBLE")
        assert got == [{"i": i, "x": v} for i, v in enumerate(values)]
    path.write_text(path.read_text() + '{"x": "bad"}')
    with pytest.raises(SchemaMismatch, match="line 301: "):
        read(path, "i BIGINT, x DOUBLE")


SCHEMA = (
    "x DOUBLE, f FLOAT, d DECIMAL(20, 4), t TIMESTAMP, y DATE, b BINARY, k STRING, n BIGINT, "
    "o BOOLEAN, s STRUCT<x: DOUBLE, t: TIMESTAMP, b: BINARY>, l ARRAY<STRUCT<d: DECIMAL(9, 2), "
    "y: DATE>>, m ARRAY<ARRAY<FLOAT>>"
)
doubles = st.none() | st.floats()
floats = st.none() | st.floats(width=32)
micros = st.none() | st.integers(-(2**62), 2**62)
days = st.none() | st.integers(-(2**31) + 1, 2**31 - 1)
binaries = st.none() | st.binary(max_size=8)


def decimals(digits: int, places: int) -> st.SearchStrategy[decimal.Decimal | None]:
    return st.none() | st.integers(-(10**digits) + 1, 10**digits - 1).map(
        lambda i: decimal.Decimal(i).scaleb(-places)
    )


rows = st.fixed_dictionaries(
    {
        "x": doubles,
        "f": floats,
        "d": decimals(20, 4),
        "t": micros,
        "y": days,
        "b": binaries,
        "k": st.none() | st.text(max_size=5),
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "o": st.none() | st.booleans(),
        "s": st.none() | st.fixed_dictionaries({"x": doubles, "t": micros, "b": binaries}),
        "l": st.none()
        | st.lists(st.none() | st.fixed_dictionaries({"d": decimals(9, 2), "y": days}), max_size=3),
        "m": st.none() | st.lists(st.none() | st.lists(floats, max_size=3), max_size=2),
    }
)


def numbered(kind: pa.DataType) -> pa.DataType:
    """Times as numbers, because Python's datetime cannot represent them."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, numbered(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(numbered(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date(kind) else kind


@given(st.lists(rows, min_size=1, max_size=5))
def test_what_the_json_sink_writes_the_source_reads(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]]
) -> None:
    schema = arrow_schema_of(SCHEMA)
    plain = pa.schema([pa.field(f.name, numbered(f.type)) for f in schema])
    # Every field has a value in some row, which a file requires.
    full = {"x": 1.0, "t": 0, "b": b""}
    first = {**values[0], "s": full, "l": [{"d": decimal.Decimal(1), "y": 0}]}
    zero = {**first, "x": -0.0, "m": [[-0.0]]}
    table = pa.Table.from_pylist([first, zero, *values], plain).cast(schema)
    path = tmp_path_factory.mktemp("json") / "in.json"
    path.write_bytes(encode_lines(table))
    batches = read_batches(fsspec.filesystem("file"), str(path), options("json"), schema, "s")
    got = pa.Table.from_batches([batch for _, batch in batches], schema)
    assert got.schema == table.schema
    assert digest_table(got) == digest_table(table)


@pytest.mark.parametrize(
    ("format", "message"),
    [("csv", "column v occurs more than once"), ("parquet", "column v occurs more than once")],
)
def test_a_duplicate_column_is_refused(tmp_path: Path, format: str, message: str) -> None:
    path = csv_file(tmp_path, "k,v,v,w,w", "a,1,2,3,4")
    if format == "parquet":
        columns = [pa.array([i]) for i in range(5)]
        pq.write_table(pa.table(columns, names=["k", "v", "v", "w", "w"]), tmp_path / "in.parquet")
        path = tmp_path / "in.parquet"
    with pytest.raises(SchemaMismatch, match=message):
        read(path, "k STRING, v INT", format)


def test_a_duplicate_column_that_is_not_read_is_ignored(tmp_path: Path) -> None:
    assert read(csv_file(tmp_path, "k,,", "a,1,2"), "k STRING", "csv") == [{"k": "a"}]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (["k,v", '1,"abc', "2,x", "3,y"], 2),
        (["k,v", "1,x", '2,"abc', "3,x", '4,"abc', "5,x"], 3),
        (["k,v", '1,"x', 'y"', '2,"an "inner" quote"'], 4),
        (["k,v", "1,x", '2,"'], 3),
    ],
)
def test_a_csv_quote_that_is_not_closed_is_refused(
    tmp_path: Path, lines: list[str], line: int
) -> None:
    with pytest.raises(SchemaMismatch, match=rf"in\.csv, line {line}: a quoted value"):
        read(csv_file(tmp_path, *lines), "k STRING, v STRING", "csv")


def test_csv_values_in_quotes_may_hold_anything(tmp_path: Path) -> None:
    long = "x" * 200_000
    rows = [{"k": k} for k in ['a"b,c', "a\nb\r\n\nc", '""', "", " ", "ü🚀", long, '"', '\n"\n']]
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8-sig") as f:
        writer = csv.writer(f, quoting=csv.QUOTE_ALL)
        writer.writerow(["k", "not\nread"])
        writer.writerows([row["k"], 'x"y'] for row in rows)
    assert read(tmp_path / "in.csv", "k STRING", "csv") == rows


def test_csv_quotes_inside_of_bare_values_are_text(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "k,v", '5" pipe,a', 'b,6"')
    path.write_bytes(path.read_bytes() + b"c,d")
    expected = [{"k": '5" pipe'}, {"k": "b"}, {"k": "c"}]
    assert read(path, "k STRING", "csv") == expected


def test_a_misspelt_csv_column_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match=r"no column carier.*did you mean carrier\?"):
        read(csv_file(tmp_path, "carrier,v", "a,1"), "carier STRING", "csv")


@pytest.mark.parametrize(
    ("ddl", "text"), [("x DOUBLE", "1e400"), ("x DOUBLE", "-1e400"), ("x FLOAT", "1e39")]
)
def test_a_csv_number_too_large_for_its_type_is_refused(
    tmp_path: Path, ddl: str, text: str
) -> None:
    path = csv_file(tmp_path, "x", "inf", "-Infinity", text)
    with pytest.raises(SchemaMismatch, match=rf"in\.csv: column x, row 3: '{text}' is not a"):
        read(path, ddl, "csv")
    assert read(csv_file(tmp_path, "x", "inf", "-Infinity"), ddl, "csv") == [
        {"x": math.inf},
        {"x": -math.inf},
    ]


def test_a_parquet_double_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [math.inf, math.nan, 1e300]}), tmp_path / "in.parquet")
    with pytest.raises(
        SchemaMismatch, match=r"column x, row 3: 1e\+300 \(in the file: double\) is not a FLOAT"
    ):
        read(tmp_path / "in.parquet", "x FLOAT", "parquet")


def test_expanded_years_are_read_from_csv(tmp_path: Path) -> None:
    lines = ["t,d", "12024-02-03T04:05:06.5Z,12024-02-03", "2024-01-01 00:00:00,2024-01-01"]
    path = csv_file(tmp_path, *lines)
    schema = arrow_schema_of("t TIMESTAMP, d DATE")
    batches = read_batches(
        fsspec.filesystem("file"), str(path), options("csv", nullValue=""), schema, "s"
    )
    table = pa.Table.from_batches([batch for _, batch in batches], schema)
    far = pc.strftime(table.column("t"), "%Y").to_pylist()
    assert far == ["12024", "2024"]
    days_to_2024 = 19723  # since 1970
    far_days, near_days = table.column("d").cast(pa.int32()).to_pylist()
    assert near_days == days_to_2024
    assert 10_000 < (far_days - days_to_2024) / 365 < 10_010
