"""Event time computed from raw columns: formats of public data sets, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rekindle.connectors.registry import open_source
from rekindle.connectors.source import ReplayableSource
from rekindle.errors import SchemaMismatch
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Node


def node_of(
    url: str, schema: str, expression: str | None, partitions: int = 1, **files: Any
) -> Node:
    event_time = {"column": "at", "expression": expression} if expression else None
    source = {
        "name": "s",
        "schema": schema,
        "partitions": partitions,
        "eventTime": event_time,
        "files": {
            k: v
            for k, v in {"url": url, "format": "csv", "rowsPerSecond": 1000, **files}.items()
            if v is not None
        },
    }
    spec = {
        "checkpoint": {"store": "file:///c"},
        "sources": [{k: v for k, v in source.items() if v is not None}],
        "queries": [{"name": "q", "from": "s", "sink": {"files": {"url": "file:///o"}}}],
    }
    return compile_topology(load_spec(spec), "t", skip_cluster_checks=True).nodes["s"]


def opened(tmp: Path, url: str, schema: str, expression: str | None, **f: Any) -> ReplayableSource:
    node = node_of(url, schema, expression, **f)
    return open_source(node.spec, node, epoch_interval_us=1_000_000, work_dir=tmp / "work")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_partitions_compute_the_event_time_of_all_rows(tmp_path: Path, format: str) -> None:
    for n in range(3):
        rows = [{"day": f"{at + 1}/1/2020", "x": "unread", "v": n} for at in (n, n + 3, n)]
        path = tmp_path / f"{n}.{format}"
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)
        elif format == "json":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            path.write_text("day,x,v\n" + "".join(f"{r['day']},x,{r['v']}\n" for r in rows))
    files = {"format": format, "fileNameColumn": "file", "rowsPerSecond": None, "speedup": 86_400}
    expression = "to_timestamp(day, 'd/M/y')"
    for order in (None, "at"):
        cuts = []
        for partitions in (1, 2):
            node = node_of(
                f"file://{tmp_path}/?.{format}",
                "day STRING, v INT",
                expression,
                partitions=partitions,
                **files,
                orderBy=order,
            )
            parts = [
                open_source(node.spec, node, 1_000_000, tmp_path / "work", partition=n)  # type: ignore[arg-type]
                for n in range(partitions)
            ]
            of_epochs = [[part.cut(epoch) for part in parts] for epoch in range(7)]
            cuts.append(
                [
                    (
                        sorted(str(row) for cut in of_epoch for row in cut.rows.to_pylist()),
                        {cut.watermark for cut in of_epoch},
                    )
                    for of_epoch in of_epochs
                ]
            )
        assert cuts[0] == cuts[1]


def times(tmp: Path, schema: str, expression: str, *rows: str, **files: Any) -> list[str | None]:
    """The event times, in ISO 8601."""
    (tmp / "in.csv").write_text("".join(f"{row}\n" for row in rows))
    url = f"file://{tmp}/in.csv"
    files = {"delimiter": ";", "header": False, **files}
    made = opened(tmp, url, schema, expression, **files).cut(0).rows.column("at")
    assert made.type == pa.timestamp("us", "UTC")
    texts = np.datetime_as_string(made.cast(pa.timestamp("us")).to_numpy())
    return [None if t == "NaT" else str(t).removesuffix(".000000") for t in texts]


@pytest.mark.parametrize(
    ("schema", "expression", "value", "time"),
    [
        ("t BIGINT", "timestamp_millis(t)", "1388534400123", "2014-01-01T00:00:00.123000"),
        ("t INT", "timestamp_seconds(t)", "-1", "1969-12-31T23:59:59"),
        ("t DOUBLE", "timestamp_seconds(t)", "1.5", "1970-01-01T00:00:01.500000"),
        ("t BIGINT", "timestamp_micros(t)", "7", "1970-01-01T00:00:00.000007"),
        ("t STRING", "to_timestamp(t, 'M/d/yyyy H:mm')", "6/21/2005 10:54", "2005-06-21T10:54:00"),
        ("t STRING", "to_timestamp(t, 'yyyy/MM/dd')", "2001/01/01", "2001-01-01T00:00:00"),
        (
            "t STRING",
            "to_timestamp(t, 'y-M-d H:m:s.SSSSSS')",
            "2001-1-1 0:0:0.25",
            "2001-01-01T00:00:00.250000",
        ),
        ("t STRING", "to_timestamp(t, 'y-M-d HHX')", "2001-1-2 00+0530", "2001-01-01T18:30:00"),
        ("t STRING", "to_timestamp(t, 'dd-MMM-yy')", "01-feb-99", "2099-02-01T00:00:00"),
        ("t STRING", "to_timestamp(t, 'MMMM d, y')", "July 4, 1976", "1976-07-04T00:00:00"),
        ("t STRING", "to_timestamp(t, 'yyyyMMddHHmmss')", "20240229235959", "2024-02-29T23:59:59"),
        ("t STRING", "to_timestamp(t, 'M/d/y h:mm a')", "1/2/2003 12:05 AM", "2003-01-02T00:05:00"),
        ("t STRING", "to_timestamp(t, 'M/d/y h:mm a')", "1/2/2003 12:05 pm", "2003-01-02T12:05:00"),
        (
            "t STRING",
            "to_timestamp(t, 'yyyy-MM-dd''T''HH:mm:ss.SSSXXX')",
            "2020-01-02T03:04:05.678+02:00",
            "2020-01-02T01:04:05.678000",
        ),
        (
            "t STRING",
            "to_timestamp(t, 'y-M-d HH:mm[:ss] Z')",
            "2020-1-2 03:04 -0130",
            "2020-01-02T04:34:00",
        ),
        ("t STRING", "to_timestamp(t)", "2020-01-02 03:04:05", "2020-01-02T03:04:05"),
        ("t DATE", "t", "2020-01-02", "2020-01-02T00:00:00"),
        (
            "d STRING, t STRING",
            "to_timestamp(d || ' ' || t, 'd.M.y H:m')",
            "3.2.2001;4:05",
            "2001-02-03T04:05:00",
        ),
        (
            "y INT, m INT",
            "to_timestamp(concat(y, '-', m, '-1'), 'y-M-d')",
            "2001;2",
            "2001-02-01T00:00:00",
        ),
        (
            "t STRING",
            "to_utc_timestamp(to_timestamp(t, 'd/M/y HH:mm'), 'Europe/Paris')",
            "14/07/2020 10:00",
            "2020-07-14T08:00:00",
        ),
        (
            "t TIMESTAMP",
            "to_utc_timestamp(t, 'America/New_York')",
            "2020-01-01 00:00:00",
            "2020-01-01T05:00:00",
        ),
        ("t STRING", "to_utc_timestamp(t, '+05:30')", "2020-01-01 00:00:00", "2019-12-31T18:30:00"),
    ],
)
def test_time_formats_become_event_time(
    tmp_path: Path, schema: str, expression: str, value: str, time: str
) -> None:
    assert times(tmp_path, schema, expression, value) == [time]


def test_a_repeated_local_time_is_the_first_one(
    tmp_path: Path,
) -> None:
    rows = ["2020-10-25 02:30:00", "2020-03-29 02:30:00"]
    got = times(tmp_path, "t STRING", "to_utc_timestamp(t, 'Europe/Paris')", *rows)
    assert got == ["2020-10-25T00:30:00", "2020-03-29T01:30:00"]


def test_null_and_empty_texts_have_no_event_time(tmp_path: Path) -> None:
    got = times(
        tmp_path, "n INT, t STRING", "to_timestamp(t, 'y-M-d')", "1;NA", "2; ", "3;2020-1-2"
    )
    assert got == [None, None, "2020-01-02T00:00:00"]


@pytest.mark.parametrize(
    ("schema", "expression", "bad", "message"),
    [
        (
            "t STRING",
            "to_timestamp(t, 'dd/MM/yyyy')",
            "1/2/2020",
            "'1/2/2020' does not match the format",
        ),
        ("t STRING", "to_timestamp(t, 'd/M/yyyy')", "31/2/2020", "no such date or time"),
        ("t STRING", "to_timestamp(t, 'd/M/yyyy H:mm')", "1/2/2020 24:00", "no such date or time"),
        ("t STRING", "to_timestamp(t, 'd/M/y HHXXX')", "1/2/2020 00+18:01", "no such date or time"),
        ("t STRING", "to_timestamp(t, 'd/M/y HHXX')", "1/2/2020 00-0160", "no such date or time"),
        ("t STRING", "to_timestamp(t)", "1/2/2020", "give to_timestamp a format"),
        (
            "t BIGINT",
            "timestamp_seconds(t)",
            "9223372036854775807",
            "outside the range of TIMESTAMP",
        ),
        ("t DOUBLE", "timestamp_seconds(t)", "NaN", "outside the range of TIMESTAMP"),
    ],
)
def test_an_invalid_time_is_named_with_its_row(
    tmp_path: Path, schema: str, expression: str, bad: str, message: str
) -> None:
    good = {"t BIGINT": "1", "t DOUBLE": "1"}.get(schema, "01/02/2020")
    # A good row precedes it only where the expression has a format of dates.
    rows = [bad] if "H" in expression or "t)" in expression else [good, bad]
    message = rf"in\.csv: eventTime\.expression, row {len(rows)}: .*{message}"
    with pytest.raises(SchemaMismatch, match=message):
        times(tmp_path, schema, expression, *rows)


def test_computed_event_time_orders_the_source(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("ms\n7200000\n0\n3600000\n")
    url = f"file://{tmp_path}/in.csv"
    pace = {"rowsPerSecond": None, "speedup": 3600, "orderBy": "at"}
    source = opened(tmp_path, url, "ms BIGINT", "timestamp_millis(ms)", **pace)
    assert [source.cut(e).rows["ms"].to_pylist() for e in range(3)] == [[0], [3600000], [7200000]]


def test_the_file_name_is_a_column_that_an_expression_can_use(tmp_path: Path) -> None:
    for day, folder in (("2020-01-02", "a"), ("2020-01-01", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"log-{day}.csv").write_text("n\n1\n")
    pattern = "to_timestamp(file, '[''a/''][''b/'']''log-''yyyy-MM-dd''.csv''')"
    source = opened(
        tmp_path, f"file://{tmp_path}/*/log-*.csv", "n INT", pattern, fileNameColumn="file"
    )
    assert source.schema.names == ["n", "file", "at"]
    rows = source.cut(0).rows
    assert rows["file"].to_pylist() == ["a/log-2020-01-02.csv", "b/log-2020-01-01.csv"]
    assert [t.day for t in rows["at"].to_pylist()] == [2, 1]
    below = opened(tmp_path, f"file://{tmp_path}/a", "n INT", None, fileNameColumn="file")
    assert below.cut(0).rows["file"].to_pylist() == ["log-2020-01-02.csv"]


def test_a_file_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv")).write_text("n\n1\n")
    with pytest.raises(SchemaMismatch, match=r"the name of caf\\udce9\.csv is not UTF-8"):
        opened(tmp_path, f"file://{tmp_path}/*.csv", "n INT", None, fileNameColumn="file")


def test_unset_options_are_not_in_the_operator_id() -> None:
    plain = node_of("file:///in/a.csv", "t TIMESTAMP", None)
    defaults: dict[str, Any] = {"delimiter": ",", "header": True, "quote": '"', "encoding": "UTF-8"}
    assert node_of("file:///in/a.csv", "t TIMESTAMP", None, **defaults).id == plain.id
    assert plain.id == "2b67f3577f93b5e9", "an id of an earlier release"
    options: list[dict[str, Any]] = [
        {"delimiter": ";"},
        {"header": False},
        {"quote": ""},
        {"escape": "\\"},
        {"encoding": "UTF-16"},
        {"fileNameColumn": "f"},
    ]
    others = [node_of("file:///in/a.csv", "t TIMESTAMP", None, **changed).id for changed in options]
    others += [node_of("file:///in/a.csv", "t TIMESTAMP", e).id for e in ("t", "to_timestamp(t)")]
    assert len({plain.id, *others}) == 9
