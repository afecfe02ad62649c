"""Event time on its way through sql: copied under any name in every SELECT, or said where not."""

from __future__ import annotations

import pytest
from topology_specs import manifest_spec, query, source, window

from rekindle.topology.checks.streams import derive_streams
from rekindle.topology.load import load_spec
from rekindle.topology.spec import TopologySpec
from rekindle.topology.validate import validate

OTHER = {"schema": "origin STRING, seen TIMESTAMP", "eventTime": {"column": "seen"}}


def spec_of(sql: str, *inputs: str) -> TopologySpec:
    sources = [
        source("s"),
        source("other", **OTHER, files={**source()["files"], "orderBy": "seen"}),
        source("timeless", eventTime=None),
    ]
    operator = {"name": "o", "inputs": list(inputs), "sql": sql}
    used = [s for s in sources if s["name"] in inputs]
    used = [{k: v for k, v in s.items() if v is not None} for s in used]
    return load_spec(manifest_spec(used, [operator, window("w", "o")], [query("q", "w")]))


@pytest.mark.parametrize(
    ("sql", "inputs", "column"),
    [
        ("SELECT * FROM s", ["s"], "ts"),
        ("SELECT origin, ts AS at FROM s", ["s"], "at"),
        ("SELECT origin, x.TS AS at FROM s x", ["s"], "at"),
        ("SELECT origin, ts AS a, ts AS b FROM s", ["s"], "a"),
        ("SELECT origin, ts AS b, date_trunc('HOUR', ts) AS ts FROM s", ["s"], "ts"),
        (
            "SELECT origin, ts FROM s UNION ALL SELECT origin, seen FROM other",
            ["s", "other"],
            "ts",
        ),
        (
            "SELECT origin, ts AS at FROM s UNION ALL SELECT * FROM other",
            ["s", "other"],
            "at",
        ),
        ("SELECT 'x' AS origin, e AS n, ts AS t FROM s LATERAL VIEW explode(array(1)) v AS e",
         ["s"], "t"),
    ],
)  # fmt: skip
def test_event_time_follows_a_copied_column(sql: str, inputs: list[str], column: str) -> None:
    spec = spec_of(sql, *inputs)
    assert derive_streams(spec).streams["o"].event_time == column
    assert [p for p in validate(spec, "t", local=True) if p.reason == "NoEventTime"] == []


@pytest.mark.parametrize(
    ("sql", "inputs", "said"),
    [
        ("SELECT origin FROM s", ["s"], "in o, SELECT FROM s does not output ts, its event time"),
        (
            "SELECT origin, date_trunc('HOUR', ts) AS at FROM s",
            ["s"],
            "in o, SELECT FROM s does not output ts",
        ),
        (
            "SELECT origin, ts AS at FROM s UNION ALL "
            "SELECT origin, date_trunc('DAY', seen) AS at FROM other",
            ["s", "other"],
            "in o, SELECT FROM other does not output seen",
        ),
        (
            "SELECT ts AS a, date_trunc('HOUR', ts) AS b, origin FROM s UNION ALL "
            "SELECT date_trunc('DAY', seen) AS a, seen AS b, origin FROM other",
            ["s", "other"],
            "the SELECTs of o output event time as different columns",
        ),
        ("SELECT origin, ts FROM timeless", ["timeless"], "source timeless has no eventTime"),
    ],
)
def test_where_event_time_is_lost_is_said(sql: str, inputs: list[str], said: str) -> None:
    found = validate(spec_of(sql, *inputs), "t", local=True)
    (problem,) = [p for p in found if p.path == "spec.operators[1].inputs[0]"]
    assert problem.reason == "NoEventTime"
    assert said in problem.message


@pytest.mark.parametrize(
    ("column", "file_name", "field", "reason"),
    [
        ("__e", None, "eventTime.column", "ReservedColumn"),
        ("Started", None, "eventTime.column", "DuplicateColumn"),
        ("at", "__f", "files.fileNameColumn", "ReservedColumn"),
        ("at", "Started", "files.fileNameColumn", "DuplicateColumn"),
        ("at", "AT", "eventTime.column", "DuplicateColumn"),
    ],
)
def test_added_columns_have_names_of_their_own_for_spark(
    column: str, file_name: str | None, field: str, reason: str
) -> None:
    made = {"column": column, "expression": "to_timestamp(started)"}
    files = {**source()["files"], "orderBy": column, "fileNameColumn": file_name}
    files = {k: v for k, v in files.items() if v is not None}
    trips = source("trips", schema="started STRING", eventTime=made, files=files)
    spec = load_spec(manifest_spec([trips], [], [query("q", "trips")]))
    found = [(p.path, p.reason) for p in validate(spec, "t", local=True)]
    assert found == [(f"spec.sources[0].{field}", reason)]
