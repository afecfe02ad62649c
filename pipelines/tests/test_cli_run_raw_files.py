"""`rekindle run` on files like public data sets, without preparation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.cli import main
from rekindle.connectors import read_sink

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("shared_jvm")]

MANIFEST = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: raw}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: sensors
    schema: "station STRING, ms BIGINT, value DOUBLE"
    eventTime: {column: measured, expression: timestamp_millis(ms)}
    files:
      url: "file:///data/sensors-*.csv"
      format: csv
      nullValue: '\\N'
      fileNameColumn: file
      orderBy: measured
      speedup: 3600
  - name: visitors
    schema: "place STRING, time STRING, count INT"
    eventTime:
      column: at
      expression: "to_utc_timestamp(to_timestamp(time, 'dd/MM/yyyy HH:mm'), 'Europe/Berlin')"
    files:
      url: "file:///data/visitors.csv"
      format: csv
      delimiter: ";"
      encoding: ISO-8859-1
      orderBy: at
      speedup: 3600
  operators:
  - name: all-rows
    inputs: [sensors, visitors]
    sql: >-
      SELECT station AS place, measured AS time, file, value FROM sensors
      UNION ALL
      SELECT place, at, CAST(NULL AS STRING) AS file, CAST(count AS DOUBLE) AS value FROM visitors
  - name: hourly
    inputs: [all-rows]
    window: {size: 1h, groupBy: [place, file], aggregate: "count(*) AS n, sum(value) AS total"}
  queries:
  - {name: hourly, from: hourly, sink: {files: {url: "file:///unused"}}}
"""
SENSORS = r"""station,value,ms
"North, upper",1.5,1388534400123
"North, upper",\N,1388534401000
"6"" pipe",2,1388538000000
"""
VISITORS = """"place";"time";"count"
"Caf\u00e9; M\u00fcnchen";"01/01/2014 01:30";7
"""


def test_raw_files_become_windows_of_event_time(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(MANIFEST)
    (tmp_path / "sensors-1.csv").write_text(SENSORS)
    (tmp_path / "visitors.csv").write_text(VISITORS, encoding="latin-1")
    arguments = ["run", str(tmp_path / "t.yaml"), "--input", str(tmp_path)]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    rows = read_sink(f"file://{tmp_path}/out/hourly").to_pylist()
    got = {(r["place"], r["window_start"].hour, r["file"], r["n"], r["total"]) for r in rows}
    assert got == {
        ("North, upper", 0, "sensors-1.csv", 2, 1.5),
        ('6" pipe', 1, "sensors-1.csv", 1, 2.0),
        ("Caf\u00e9; M\u00fcnchen", 0, None, 1, 7.0),
    }
