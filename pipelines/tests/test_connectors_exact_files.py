"""Values that a reader of files changes before any conversion sees them: exact, or refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rekindle.arrow_types import TIMESTAMP
from rekindle.connectors.files_read import decode_json, read_batches
from rekindle.errors import SchemaMismatch
from rekindle.topology.kinds.files import FilesSourceSpec

NANOS = [1_717_236_000_123_456_000, -1_000, 0, None]


def read(path: Path, data_type: pa.DataType) -> list[Any]:
    options = FilesSourceSpec.model_validate(
        {"url": f"file://{path}", "format": path.suffix[1:], "rowsPerSecond": 1}
    )
    fs, schema = fsspec.filesystem("file"), pa.schema([("c", data_type)])
    found = read_batches(fs, str(path), options, schema, "s")
    return [value for _, batch in found for value in batch.column(0).to_pylist()]


def int96(path: Path, values: pa.Array) -> Path:
    pq.write_table(pa.table({"c": values}), path, use_deprecated_int96_timestamps=True)
    return path


@pytest.mark.parametrize("nested", ["", "struct", "list"])
def test_times_of_int96_are_whole_microseconds_or_refused(tmp_path: Path, nested: str) -> None:
    def column(nanos: list[int | None]) -> pa.Array:
        times = pa.array(nanos, pa.int64()).cast(pa.timestamp("ns"))
        if nested == "struct":
            return pa.StructArray.from_arrays([times], ["t"])
        return pa.ListArray.from_arrays(np.arange(len(times) + 1), times) if nested else times

    wanted = {"": TIMESTAMP, "struct": pa.struct([("t", TIMESTAMP)]), "list": pa.list_(TIMESTAMP)}
    path = tmp_path / "a.parquet"
    assert len(read(int96(path, column(NANOS)), wanted[nested])) == 4
    with pytest.raises(SchemaMismatch, match=r"column c, row 3: .*has nanoseconds"):
        read(int96(path, column([*NANOS[:2], 1_717_236_000_123_456_789])), wanted[nested])


def test_times_of_int96_may_be_outside_of_64_bits_of_nanoseconds(tmp_path: Path) -> None:
    days = [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)]
    path = int96(tmp_path / "a.parquet", pa.array(days, pa.timestamp("us")))
    assert read(path, TIMESTAMP) == [day.replace(tzinfo=dt.UTC) for day in days]


@pytest.mark.parametrize("data_type", [pa.string(), pa.list_(pa.string()), pa.int64()])
def test_text_in_parquet_is_utf8_or_refused(tmp_path: Path, data_type: pa.DataType) -> None:
    offsets = pa.py_buffer(np.array([0, 1, 2, 5], np.int32))
    texts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"12ab\xff"))
    is_list = pa.types.is_list(data_type)
    column = pa.ListArray.from_arrays(np.arange(4), texts) if is_list else texts
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"c": column}), path)
    with pytest.raises(SchemaMismatch, match=r"column c, row 3: .*UTF8"):
        read(path, data_type)


@pytest.mark.parametrize(
    ("text", "data_type"),
    [
        ("9" * 20 + "." + "9" * 18, pa.decimal128(38, 18)),
        ("-0." + "9" * 38, pa.decimal128(38, 38)),
        ("." + "9" * 38, pa.decimal128(38, 38)),
        ("9" * 38, pa.decimal128(38, 0)),
        (".0", pa.decimal128(10, 2)),
        ("-.0", pa.decimal128(10, 2)),
    ],
)
def test_decimals_of_all_digits_are_read(
    tmp_path: Path, text: str, data_type: pa.DecimalType
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"c\n{text}\n1E-1\n" if data_type.scale else f"c\n{text}\n")
    assert read(path, data_type)[0] == Decimal(text)
    for beside in ("", '{"c": 1e0}\n' if data_type.scale < 38 else ""):
        lines = f'{beside}{{"c": "{text}"}}\n'.encode()
        (batch,) = decode_json(lines, pa.schema([("c", data_type)]))
        assert batch.column(0)[-1].as_py() == Decimal(text)


@pytest.mark.parametrize("escaped", [r"1\u0045-100000000", r"\u0031E-1000000000", r"1\u0065999"])
def test_an_exponent_may_be_an_escape(escaped: str) -> None:
    """Arrow's parser reads beyond its table for such an exponent, and the process would end."""
    with pytest.raises(SchemaMismatch, match="line 1"):
        list(
            decode_json(f'{{"c": "{escaped}"}}'.encode(), pa.schema([("c", pa.decimal128(38, 0))]))
        )


@pytest.mark.parametrize(
    ("text", "data_type"),
    [
        ("18446744073709553640-01-01", TIMESTAMP),
        ("18446744073709553640-01-01", pa.date32()),
        ("2024-06-01[Europe/Paris]", TIMESTAMP),
        ("12024-06-01T00:00:00Z", pa.date32()),
        ("2024-06-01T10:00:00[Europe/Paris]", TIMESTAMP),
    ],
)
def test_no_part_of_a_time_is_dropped(tmp_path: Path, text: str, data_type: pa.DataType) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"c\n{text}\n")
    with pytest.raises(SchemaMismatch, match="row 1"):
        read(path, data_type)
