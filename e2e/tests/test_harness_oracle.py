"""What the reference execution knows without being executed."""

from __future__ import annotations

from pathlib import Path

from rekindle_testing.harness.oracle import Reference

_RESOURCE = {
    "apiVersion": "rekindle.dev/v1alpha1",
    "kind": "StreamTopology",
    "metadata": {"name": "t"},
    "spec": {
        "epochInterval": "1s",
        "checkpoint": {"store": "file:///var/lib/rekindle/checkpoints", "volume": "rekindle"},
        "sources": [
            {
                "name": "clicks",
                "schema": "t TIMESTAMP",
                "eventTime": {"column": "t"},
                "generator": {"rowsPerSecond": 10, "rows": 50, "columns": {"t": "timestamp"}},
            }
        ],
        "operators": [{"name": "all", "inputs": ["clicks"], "sql": "SELECT t FROM clicks"}],
        "queries": [
            {
                "name": "q",
                "from": "all",
                "priority": 1,
                "sink": {"files": {"url": "file:///var/lib/rekindle/q", "format": "parquet"}},
            }
        ],
    },
}


def test_the_end_of_generated_rows_is_known(tmp_path: Path) -> None:
    # 50 rows at 10 a second are in epochs 0 to 4; the next one has END_OF_INPUT.
    assert Reference(_RESOURCE, tmp_path, tmp_path / "oracle").last_epoch == 5
