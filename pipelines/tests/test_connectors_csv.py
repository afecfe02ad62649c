"""Options of CSV files: each with a small file like public data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from schema_parts import arrow_schema_of

from rekindle.connectors.files_read import read_batches
from rekindle.errors import SchemaMismatch
from rekindle.topology.kinds.files import FilesSourceSpec


def read(tmp: Path, data: str | bytes, ddl: str = "a INT, b STRING", **fields: Any) -> list[Any]:
    """The rows as tuples."""
    path = tmp / "in.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    given = {"url": "file:///in", "format": "csv", "rowsPerSecond": 1, **fields}
    schema = arrow_schema_of(ddl)
    options = FilesSourceSpec.model_validate(given)
    batches = read_batches(fsspec.filesystem("file"), str(path), options, schema, "s")
    table = pa.Table.from_batches([batch for _, batch in batches], schema)
    return [tuple(row.values()) for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("data", "fields", "rows"),
    [
        ("a;b\n1;x,y\n", {"delimiter": ";"}, [(1, "x,y")]),
        ('a;b\n1;"x;y"\n', {"delimiter": ";"}, [(1, "x;y")]),
        ("a\tb\n1\tx\n", {"delimiter": "\t"}, [(1, "x")]),
        ("a\tb\n1\tx\n", {"delimiter": r"\t"}, [(1, "x")]),
        ("1,x\n2,y\n", {"header": False}, [(1, "x"), (2, "y")]),
        ("", {"header": False}, []),
        ("\ufeff1,x\n", {"header": False}, [(1, "x")]),
        ("a,b\n1,'x,y'\n", {"quote": "'"}, [(1, "x,y")]),
        ("a,b\n1,'it''s'\n", {"quote": "'"}, [(1, "it's")]),
        ('a,b\n1,6" pipe\n', {"quote": ""}, [(1, '6" pipe')]),
        ('a,b\n1,"x\\"y"\n', {"escape": "\\"}, [(1, 'x"y')]),
        ('a,b\n1,"x""y"\n', {"escape": "\\"}, [(1, 'x"y')]),
        ('a,b\n1,"x\\\\"\n2,"\\", z"\n', {"escape": "\\"}, [(1, "x\\"), (2, '", z')]),
        ("a,b\n\\N,\\N\n1,NA\n", {"nullValue": r"\N"}, [(None, None), (1, "NA")]),
        ('a,b\n1,"\\N"\n', {"nullValue": r"\N"}, [(1, r"\N")]),
        ('a,b\n1,"x ""y"", z"\n2,""\n', {"escape": '"'}, [(1, 'x "y", z'), (2, "")]),
        ("\n\na,b\n\n1,x\n", {}, [(1, "x")]),
        ("a,b", {}, []),
        ("a,b\n", {}, []),
        ("\n1,x\n", {"header": False}, [(1, "x")]),
        (f"1,{'x' * 200_000}\n", {"header": False}, [(1, "x" * 200_000)]),
        ("a,b\n1,caf\u00e9\n".encode("latin-1"), {"encoding": "ISO-8859-1"}, [(1, "caf\u00e9")]),
        ("a,b\n1,\u20ac\n".encode("cp1252"), {"encoding": "windows-1252"}, [(1, "\u20ac")]),
        ("a,b\n1,caf\u00e9\n".encode("utf-16"), {"encoding": "UTF-16"}, [(1, "caf\u00e9")]),
        ("\ufeffa,b\n1,x\n".encode("utf-16-le"), {"encoding": "UTF-16LE"}, [(1, "x")]),
        ('a,b\n1,"\u8868,"\n'.encode("shift_jis"), {"encoding": "Shift_JIS"}, [(1, "\u8868,")]),
        (
            '"b";"a"\n"caf\u00e9; bar";1\n'.encode("latin-1"),
            {"encoding": "ISO-8859-1", "delimiter": ";"},
            [(1, "caf\u00e9; bar")],
        ),
    ],
)
def test_an_option_reads_what_its_files_hold(
    tmp_path: Path, data: str | bytes, fields: dict[str, Any], rows: list[Any]
) -> None:
    assert read(tmp_path, data, **fields) == rows


@pytest.mark.parametrize(
    "data",
    [",b\n1,x\n2,y\n", "\ufeff,b\n1,x\n2,y\n", '\n\n"",b\n1,x\n\n2,y\n', ",b\r\n1,x\r\n2,y\r\n"],
)
def test_a_column_without_a_name_has_its_number(tmp_path: Path, data: str) -> None:
    assert read(tmp_path, data, "b STRING, _c0 INT") == [("x", 1), ("y", 2)]
    assert read(tmp_path, data, "b STRING") == [("x",), ("y",)]
    with pytest.raises(SchemaMismatch, match=r"no column a; the file has _c0, b: name"):
        read(tmp_path, data)


def test_a_column_name_in_the_header_wins_over_a_number(tmp_path: Path) -> None:
    assert read(tmp_path, ",_c0\n1,2\n", "_c0 INT") == [(2,)]


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        ("a;b\n1;x\n", {}, r"no column a, b; the file has a;b.*set delimiter: \";\""),
        ("1;x\n", {"header": False}, r"the first row has 1 values, and the schema 2.*\";\""),
        ("a,b\n1,2,3\n", {}, "a row has 3 values instead of 2: '1,2,3'"),
        ("1,2\n1\n", {"header": False}, "a row has 1 values instead of 2: '1'"),
        ("a,b\n1,caf\u00e9\n".encode("latin-1"), {}, "is not UTF-8; set the encoding.*ISO-8859-1"),
        ("a,b\n1,caf\u00e9\n", {"encoding": "US-ASCII"}, "is not US-ASCII; set the encoding"),
        ("a,b\n1,'x\n", {"quote": "'"}, "line 2: a quoted value is not closed"),
        ('a,b\n1,"x\\"\n', {"escape": "\\"}, "line 2: a quoted value is not closed"),
        ("", {}, "the file is empty.*header: false"),
        ("\n", {}, "the file is empty.*header: false"),
        ("a,b\nx,1\n", {}, "column a, row 1: 'x' is not a INT"),
        (
            "d;b\n1,5;x\n",
            {"delimiter": ";", "ddl": "d DOUBLE, b STRING"},
            r"row 1: '1,5' is not a DOUBLE; .*CAST\(replace\(d, ',', '.'\) AS DOUBLE\) in sql",
        ),
    ],
)
def test_the_refusal_of_a_csv_dialect_names_the_option(
    tmp_path: Path, data: str | bytes, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        read(tmp_path, data, **fields)
