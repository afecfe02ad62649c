"""Unsupported column types, and casts of strings that need the clock, are refused without Spark."""

from __future__ import annotations

import pytest

from rekindle.topology.schema import Scalar
from rekindle.topology.sql.aggregates import parse_aggregates, type_problems
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.row_wise import check_sql

SCHEMA = ddl_to_schema(
    "s STRING, b TIMESTAMP, t TIMESTAMP, d DATE, n BIGINT, p DECIMAL(10, 2), a ARRAY<INT>, "
    "ok BOOLEAN"
)


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        ("map('a', 1)", "map_entries"),
        ("struct(map('a', 1) AS m)", "map_entries"),
        ("b - t", "unix_micros"),
        ("(b - t)", "unix_micros"),
        ("d - d", "unix_micros"),
        ("INTERVAL 1 DAY", "unix_micros"),
        ("CAST(t AS TIMESTAMP_NTZ)", "use TIMESTAMP"),
        ("CAST(s AS CHAR(3))", "use STRING"),
        ("CAST(s AS VARCHAR(3))", "use STRING"),
    ],
)
def test_a_type_that_columns_cannot_have_is_refused(item: str, hint: str) -> None:
    (found,) = check_sql(f"SELECT {item} AS x FROM rows", {"rows": SCHEMA}).problems
    assert (found.reason, hint in found.hint) == ("NotSupportedYet", True), found


@pytest.mark.parametrize(
    "item",
    [
        "b - INTERVAL 1 HOUR",
        "map('a', 1)['a']",
        "unix_micros(b) - unix_micros(t)",
        "CAST(b - t AS BIGINT)",
        "b - t > INTERVAL 1 HOUR",
        "map_entries(map('a', 1))",
    ],
)
def test_unsupported_types_may_be_inside_an_expression(item: str) -> None:
    assert check_sql(f"SELECT {item} AS x FROM rows", {"rows": SCHEMA}).problems == ()


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ("array_position(a, 1)", None),
        ("array_position(a, 1) + 1", None),
        ("timestampdiff(SECOND, b, t)", None),
        ("round(p, 1)", None),
        ("1.5 * n", None),
        ("CAST(1.5 * n AS BIGINT)", Scalar.BIGINT),
        ("n > 1.5", Scalar.BOOLEAN),
        ("n + 1", Scalar.BIGINT),
        ("trunc(d, 'MM')", Scalar.DATE),
        ("date_trunc('DAY', t)", Scalar.TIMESTAMP),
    ],
)
def test_a_doubtful_type_is_unknown(item: str, kind: Scalar | None) -> None:
    schema = check_sql(f"SELECT {item} AS x FROM rows", {"rows": SCHEMA}).schema
    assert schema is not None
    assert schema.field("x").type is kind


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("max(b - t)", "NotSupportedYet"),
        ("min(b - t) FILTER (WHERE n > 1)", "NotSupportedYet"),
        ("avg(t)", "NotANumber"),
        ("sum(t)", "NotANumber"),
        ("avg(d)", "NotANumber"),
        ("sum(ok)", "NotANumber"),
        ("avg(s)", "NotANumber"),
        ("round(avg(t) / 2)", "NotANumber"),
    ],
)
def test_an_aggregate_of_an_unsupported_type_is_refused(item: str, reason: str) -> None:
    (aggregate,) = parse_aggregates(f"{item} AS x")
    assert [f.reason for f in type_problems(aggregate, SCHEMA)] == [reason]


@pytest.mark.parametrize(
    "item", ["max(t)", "avg(p)", "sum(n)", "avg(CAST(s AS INT))", "max(s)", "min(ok)"]
)
def test_aggregates_of_supported_types_are_accepted(item: str) -> None:
    (aggregate,) = parse_aggregates(f"{item} AS x")
    assert type_problems(aggregate, SCHEMA) == []


@pytest.mark.parametrize(
    "item",
    [
        "TIMESTAMP '5:17'",
        "CAST('T09:00' AS TIMESTAMP)",
        "from_json(s, 'at TIMESTAMP')",
        "from_csv(s, 'at timestamp, n INT')",
        "variant_get(parse_json(s), '$.at', 'timestamp')",
        "'5:17'::TIMESTAMP",
        "CAST(split(s, ',') AS ARRAY<TIMESTAMP>)",
        "split(s, ',')::ARRAY<TIMESTAMP>",
        "TRY_CAST(struct(s AS x) AS STRUCT<x: TIMESTAMP>)",
        "'2020' '-01'::TIMESTAMP",
        "t > '5:17'",
        "upper(s) = t",
        "t BETWEEN '2020-01-01' AND s",
    ],
)
def test_a_cast_that_needs_the_current_date_is_refused(item: str) -> None:
    found = check_sql(f"SELECT {item} AS x FROM rows", {"rows": SCHEMA}).problems
    assert [f.reason for f in found] == ["NonDeterministic"]


@pytest.mark.parametrize(
    "item",
    [
        "to_timestamp(s, 'HH:mm')",
        "TIMESTAMP '2020-01-01 05:17:00'",
        "from_json(s, 'at TIMESTAMP', map('timestampFormat', 'yyyy-MM-dd HH:mm'))",
        "from_json(s, 'at STRING')",
        "s::TIMESTAMP",
        "CAST(NULL AS ARRAY<TIMESTAMP>)",
        "array(d)::ARRAY<TIMESTAMP>",
        "t > '2020-01-01'",
        "s > '5:17'",
        "t = to_timestamp(s)",
        "t BETWEEN '2020-01-01' AND b",
    ],
)
def test_a_cast_with_a_date_or_a_format_is_accepted(item: str) -> None:
    assert check_sql(f"SELECT {item} AS x FROM rows", {"rows": SCHEMA}).problems == ()


def test_only_casts_to_timestamp_are_guarded() -> None:
    sql = "SELECT CAST(s AS DATE), to_timestamp(s, 'HH'), struct(1 AS timestamp), 'cast(s as x)'"
    assert time_without_date_as_null(sql) == sql


@pytest.mark.parametrize(
    "comment", [" -- c", "-- c\n", " /* c */", "\n-- one\n-- two", " --", "\n", ";", " ; -- c"]
)
@pytest.mark.parametrize("last", ["'it''s'", "r'x'", "X'ff'", "`a b`", "(n)", "1.5D", "é", "a[0]"])
def test_a_text_ends_where_its_last_token_does(last: str, comment: str) -> None:
    """So text can be written after it."""
    for sql in (f"SELECT n -- first\n, {last}", f"SELECT CAST(n AS TIMESTAMP), {last}"):
        assert time_without_date_as_null(sql + comment) == time_without_date_as_null(sql)
        assert time_without_date_as_null(sql).endswith(last)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("s::TIMESTAMP", "s"),
        ("n + s::timestamp", "s"),
        ("a[0]::timestamp", "a[0]"),
        ("x.y.z::timestamp_ltz", "x.y.z"),
        ("upper(concat(s, ')'))::timestamp", "upper(concat(s, ')'))"),
        ("(s || s)::timestamp", "(s || s)"),
        ("CASE WHEN ok THEN s END::timestamp", "CASE WHEN ok THEN s END"),
        ("s::decimal(10, 2)::timestamp", "s::decimal(10, 2)"),
        ("from_json(s, 'x STRING').x::timestamp", "from_json(s, 'x STRING').x"),
        ("DATE '2020-01-01'::timestamp", "DATE '2020-01-01'"),
        ("`a b`::timestamp", "`a b`"),
        ("transform(a, x -> x::timestamp)", "x"),
        ("ok IN (s::timestamp)", "s"),
    ],
)
def test_a_cast_by_colons_guards_its_operand(item: str, text: str) -> None:
    guard = f"(CASE WHEN typeof({text}) LIKE 'string%' AND NOT"
    before, found, after = time_without_date_as_null(f"SELECT {item} FROM rows").partition(guard)
    assert found, time_without_date_as_null(item)
    assert f"ELSE {text} END)::" in after
    assert before + text == f"SELECT {item}"[: len(before) + len(text)]


def test_nested_casts_are_each_guarded() -> None:
    guarded = time_without_date_as_null("SELECT CAST(upper(s::timestamp) AS TIMESTAMP) FROM rows")
    assert guarded.count("typeof(s)") == 3, "the guard around it contains it three times"


def test_an_alias_names_the_column_of_an_outer_generator() -> None:
    for call in ("explode_outer(a)", "explode(a)", "stack(2, 1, 2)"):
        report = check_sql(f"SELECT {call} AS x FROM rows", {"rows": SCHEMA})
        assert (report.problems, report.schema and report.schema.names) == ((), ["x"])


def test_a_generator_without_names_gets_a_hint() -> None:
    (found,) = check_sql("SELECT stack(2, 1, 2) FROM rows", {"rows": SCHEMA}).problems
    assert found.hint.startswith("write STACK(2, 1, 2) AS (name, ...)")
