"""Event time through sql operators: copied under any name in every SELECT, or reported where
not."""

from __future__ import annotations

from typing import Any

import pytest
from topology_specs import query, source, topology_spec, window

from rekindle.errors import Problem
from rekindle.topology.checks.streams import derive_streams
from rekindle.topology.load import load_spec
from rekindle.topology.spec import TopologySpec
from rekindle.topology.validate import validate

OTHER = {"schema": "origin STRING, seen TIMESTAMP", "eventTime": {"column": "seen"}}

UNGROUPED_DAILY = {"size": "1d", "aggregate": "sum(rows) AS rows"}


def spec_of(sql: str, *inputs: str) -> TopologySpec:
    sources = [
        source("s"),
        source("other", **OTHER, files={**source()["files"], "orderBy": "seen"}),
        source("timeless", eventTime=None),
    ]
    operator = {"name": "o", "inputs": list(inputs), "sql": sql}
    used = [s for s in sources if s["name"] in inputs]
    used = [{k: v for k, v in s.items() if v is not None} for s in used]
    return load_spec(topology_spec(used, [operator, window("w", "o")], [query("q", "w")]))


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
    assert [
        p for p in validate(spec, "t", skip_cluster_checks=True) if p.reason == "NoEventTime"
    ] == []


@pytest.mark.parametrize(
    ("sql", "inputs", "message"),
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
            "in o, UNION ALL matches columns by position, and event time is "
            "column 1 of SELECT FROM s, but column 2 of SELECT FROM other",
        ),
        ("SELECT origin, ts FROM timeless", ["timeless"], "source timeless has no eventTime"),
    ],
)
def test_a_lost_event_time_is_reported_with_its_place(
    sql: str, inputs: list[str], message: str
) -> None:
    found = validate(spec_of(sql, *inputs), "t", skip_cluster_checks=True)
    (problem,) = [p for p in found if p.path == "spec.operators[1].inputs[0]"]
    assert problem.reason == "NoEventTime"
    assert message in problem.message


@pytest.mark.parametrize(("kind", "timed"), [("DATE", True), ("TIMESTAMP", True), ("INT", False)])
def test_speedup_needs_event_time_or_an_order_by_times(kind: str, timed: bool) -> None:
    timeless = source(schema=f"origin STRING, ts {kind}")
    del timeless["eventTime"]
    spec = load_spec(topology_spec([timeless], [], [query("q", "s")]))
    found = [(p.path, p.reason) for p in validate(spec, "t", skip_cluster_checks=True)]
    assert found == ([] if timed else [("spec.sources[0].files.speedup", "NoEventTime")])


@pytest.mark.parametrize(
    ("data_type", "sortable"),
    [
        ("BINARY", True),
        ("STRUCT<a: BIGINT, b: STRUCT<c: DATE>>", True),
        ("ARRAY<BIGINT>", False),
        ("STRUCT<a: BIGINT, b: STRUCT<c: ARRAY<DATE>>>", False),
    ],
)
def test_rows_are_ordered_by_what_can_be_sorted(data_type: str, sortable: bool) -> None:
    files = {**source()["files"], "orderBy": "k"}
    spec = load_spec(
        topology_spec(
            [source(schema=f"k {data_type}, t TIMESTAMP", eventTime={"column": "t"}, files=files)],
            [],
            [query("q", "s")],
        )
    )
    found = [(p.path, p.reason) for p in validate(spec, "t", skip_cluster_checks=True)]
    assert found == ([] if sortable else [("spec.sources[0].files.orderBy", "InvalidValue")])


TWO_TIMES = "k STRING, u TIMESTAMP, t TIMESTAMP"


def union_spec(sql: str) -> TopologySpec:
    """`sql` over the inputs a and b, with the columns k, u and t, of which t is event time."""
    timed = {"schema": TWO_TIMES, "eventTime": {"column": "t"}}
    files = {**source()["files"], "orderBy": "t"}
    operator = {"name": "o", "inputs": ["a", "b"], "sql": sql}
    daily = window("w", "o", window={"size": "1d", "aggregate": "count(*) AS n"})
    sources = [source("a", **timed, files=files), source("b", **timed, files=files)]
    return load_spec(topology_spec(sources, [operator, daily], [query("q", "w")]))


@pytest.mark.parametrize(
    ("sql", "column"),
    [
        ("SELECT u, t FROM a UNION ALL SELECT u, t FROM b", "t"),
        ("SELECT * FROM a UNION ALL SELECT * FROM b", "t"),
        ("SELECT t AS u, u AS t FROM a UNION ALL SELECT u, t FROM b", "t"),
        ("SELECT u, t FROM a UNION ALL SELECT u, t AS x FROM b", "t"),
        ("SELECT u, t AS x FROM a UNION ALL SELECT u, t FROM b", "x"),
        ("SELECT t AS x, t FROM a UNION ALL SELECT t, u FROM b", "x"),
        ("SELECT t AS x, t FROM a UNION ALL SELECT t AS x, t FROM b", "t"),
        ("SELECT u, t FROM a UNION ALL SELECT u, date_trunc('HOUR', t) AS t FROM b", "t"),
        ("SELECT u, t FROM a UNION ALL SELECT u, TIMESTAMP'2020-01-01' AS t FROM b", "t"),
        ("SELECT u, t FROM a UNION ALL (SELECT u, t FROM b UNION ALL SELECT u, t FROM a)", "t"),
    ],
)
def test_event_time_goes_through_a_union_by_position(sql: str, column: str) -> None:
    spec = union_spec(sql)
    assert derive_streams(spec).streams["o"].event_time == column
    assert validate(spec, "t", skip_cluster_checks=True) == []


SWAPPED = "event time is column 2 of SELECT FROM a, but column 1 of SELECT FROM b"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT u, t FROM a UNION ALL SELECT t, u FROM b", SWAPPED),
        ("SELECT u, t FROM a UNION ALL SELECT t AS u, u AS t2 FROM b", SWAPPED),
        ("SELECT u, t FROM a UNION ALL (SELECT u, t FROM a UNION ALL SELECT t, u FROM b)", SWAPPED),
        (
            "SELECT u, t FROM a UNION ALL SELECT u, date_trunc('HOUR', t) AS x FROM b",
            "SELECT FROM b does not output t, its event time",
        ),
        (
            "SELECT u, t FROM a UNION ALL SELECT u, TIMESTAMP'2020-01-01' AS x FROM b",
            "SELECT FROM b does not output t, its event time",
        ),
        (
            "SELECT t, date_trunc('HOUR', t) AS x FROM a UNION ALL "
            "SELECT t AS y, date_trunc('HOUR', t) AS t FROM b",
            "event time is column 1 of SELECT FROM a, but column 2 of SELECT FROM b",
        ),
    ],
)
def test_a_union_without_event_time_at_one_position_is_refused(sql: str, message: str) -> None:
    (problem,) = validate(union_spec(sql), "t", skip_cluster_checks=True)
    assert (problem.path, problem.reason) == ("spec.operators[1].inputs[0]", "NoEventTime")
    assert message in problem.message
    assert problem.hint is not None
    assert "at the same position" in problem.hint


def test_a_common_table_expression_is_refused() -> None:
    found = validate(
        union_spec("WITH c AS (SELECT t, u FROM b) SELECT * FROM c"), "t", skip_cluster_checks=True
    )
    assert "NotRowWise" in {problem.reason for problem in found}


def test_a_window_refuses_a_union_of_window_ends_and_row_times() -> None:
    hours = window("hours", "s")
    ends = {"name": "ends", "inputs": ["hours"], "sql": "SELECT window_end AS at, rows FROM hours"}
    plain = {"name": "plain", "inputs": ["s"], "sql": "SELECT ts AS at, n AS rows FROM s"}
    union = "SELECT * FROM ends UNION ALL SELECT * FROM plain"
    mixed = {"name": "mixed", "inputs": ["ends", "plain"], "sql": union}
    kept = {"name": "kept", "inputs": ["mixed"], "sql": "SELECT * FROM mixed WHERE rows > 0"}

    def found(*operators: dict[str, Any]) -> list[Problem]:
        spec = topology_spec([source()], [hours, ends, plain, *operators], [query("q", "w")])
        return validate(load_spec(spec), "t", skip_cluster_checks=True)

    (problem,) = found(mixed, kept, window("w", "kept", window=UNGROUPED_DAILY))
    assert (problem.path, problem.reason) == ("spec.operators[5].inputs[0]", "InputsDiffer")
    assert found(window("w", "ends", "plain", window=UNGROUPED_DAILY)) == []


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
    spec = load_spec(topology_spec([trips], [], [query("q", "trips")]))
    found = [(p.path, p.reason) for p in validate(spec, "t", skip_cluster_checks=True)]
    assert found == [(f"spec.sources[0].{field}", reason)]
