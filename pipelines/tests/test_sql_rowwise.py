"""SQL of an operator without Spark: its inputs, its output, and what is refused."""

from __future__ import annotations

import time

import pytest

from rekindle.topology.schema import Field, Scalar, Schema, Struct
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.row_wise import SqlAnalysis, check_sql

SCHEMA = ddl_to_schema(
    "n BIGINT, tags ARRAY<STRUCT<k: INT>>, s STRUCT<f: STRING, g: STRUCT<h: INT>>, "
    "ts TIMESTAMP, `a b` STRING, price DECIMAL(10, 2)"
)


def check(sql: str) -> SqlAnalysis:
    return check_sql(sql, {"rows": SCHEMA})


def names(sql: str) -> list[str]:
    report = check(sql)
    assert report.problems == ()
    assert report.schema is not None
    return list(report.schema.names)


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT * FROM rows", SCHEMA.names),
        ("SELECT * EXCEPT (n, tags) FROM rows", ["s", "ts", "a b", "price"]),
        ("SELECT r.* FROM rows r WHERE r.n > 1", SCHEMA.names),
        ("SELECT s.*, s.g.h, rows.s.f AS x FROM rows", ["f", "g", "h", "x"]),
        ("SELECT N, `a b` FROM ROWS", ["N", "a b"]),
        ("SELECT n + 1 AS a, a * 2 AS b FROM rows", ["a", "b"]),
        ("SELECT explode(tags) FROM rows", ["col"]),
        ("SELECT explode(tags) AS tag FROM rows", ["tag"]),
        ("SELECT n, posexplode(tags) FROM rows", ["n", "pos", "col"]),
        ("SELECT posexplode(tags) AS (p, c) FROM rows", ["p", "c"]),
        ("SELECT n, t.k FROM rows LATERAL VIEW explode(tags) x AS t", ["n", "k"]),
        ("SELECT n FROM rows LATERAL VIEW OUTER posexplode(tags) x AS p, t WHERE p > 0", ["n"]),
        ("SELECT transform(tags, t -> t.k + n) AS ks FROM rows", ["ks"]),
        ("SELECT n FROM rows UNION ALL SELECT n * 2 AS m FROM rows", ["n"]),
        ("SELECT (s.f LIKE ANY ('a%', 'b%')) AS l, n IN (1, 2) AS i FROM rows", ["l", "i"]),
        ("SELECT timestampadd(HOUR, 1, ts) AS t, extract(HOUR FROM ts) AS h FROM rows", ["t", "h"]),
        ("SELECT unix_timestamp(ts) AS u FROM rows", ["u"]),
    ],
)
def test_the_names_of_the_output_are_those_that_spark_gives(sql: str, columns: list[str]) -> None:
    assert names(sql) == columns


def test_unknown_types_are_marked() -> None:
    report = check(
        "SELECT n, ts, s.g, n / 2 AS half, date_trunc('DAY', ts) AS day, n > 1 AS many, "
        "upper(s.f) AS f, CAST(n AS STRING) AS t, transform(tags, t -> t.k) AS ks FROM rows"
    )
    assert report.schema is not None
    known = {f.name: f.type for f in report.schema if f.type is not None}
    assert known == {
        "n": Scalar.BIGINT,
        "ts": Scalar.TIMESTAMP,
        "g": Struct((Field("h", Scalar.INT),)),
        "half": Scalar.DOUBLE,
        "day": Scalar.TIMESTAMP,
        "many": Scalar.BOOLEAN,
        "f": Scalar.STRING,
        "t": Scalar.STRING,
    }
    assert report.schema.field("ks").type is None


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT DISTINCT n FROM rows", "DISTINCT"),
        ("SELECT n FROM rows GROUP BY n", "GROUP BY"),
        ("SELECT n FROM rows GROUP BY ALL", "GROUP BY"),
        ("SELECT n FROM rows HAVING n > 1", "HAVING"),
        ("SELECT n FROM rows SORT BY n", "SORT BY"),
        ("SELECT n FROM rows CLUSTER BY n", "CLUSTER BY"),
        ("SELECT n FROM rows DISTRIBUTE BY n", "DISTRIBUTE BY"),
        ("SELECT n FROM rows LIMIT 1 OFFSET 2", "OFFSET"),
        ("SELECT n FROM rows, rows", "JOIN"),
        ("SELECT x FROM rows, LATERAL explode(tags) AS t(x)", "JOIN"),
        ("SELECT lag(n) AS l FROM rows", "lag()"),
        ("SELECT sum(n) OVER () AS s FROM rows", "OVER"),
        ("SELECT n FROM rows QUALIFY n > 1", "QUALIFY"),
        ("SELECT n FROM rows WHERE EXISTS (SELECT 1 FROM rows)", "subquery"),
        ("SELECT (SELECT 1) AS x FROM rows", "subquery"),
        ("WITH q AS (SELECT * FROM rows) SELECT n FROM q", "WITH"),
        ("SELECT n FROM rows UNION SELECT n FROM rows", "UNION"),
        ("SELECT n FROM rows EXCEPT SELECT n FROM rows", "EXCEPT"),
        ("SELECT n FROM rows INTERSECT ALL SELECT n FROM rows", "INTERSECT"),
        ("SELECT n FROM rows UNION ALL SELECT n FROM rows ORDER BY n", "ORDER BY"),
        ("(SELECT n FROM rows LIMIT 1) UNION ALL (SELECT n FROM rows)", "LIMIT"),
        ("SELECT /*+ REPARTITION(3) */ n FROM rows", "hint"),
        ("SELECT n FROM rows TABLESAMPLE (10 PERCENT)", "TABLESAMPLE"),
        ("SELECT * FROM rows PIVOT (max(n) FOR n IN (1))", "PIVOT"),
        ("SELECT TRANSFORM(n) USING 'cat' FROM rows", "TRANSFORM"),
        ("SELECT n FROM rows |> AGGREGATE count(*) GROUP BY n", "aggregate"),
        ("INSERT INTO t SELECT n FROM rows", "INSERT"),
        ("VALUES (1)", "VALUES"),
    ],
)
def test_sql_that_needs_several_rows_is_refused(sql: str, message: str) -> None:
    found = [f for f in check(sql).problems if f.reason == "NotRowWise"]
    assert any(message in f.message for f in found), check(sql).problems


@pytest.mark.parametrize(
    "expression",
    [
        "rand()",
        "`rand`()",
        "randn(5)",
        "random()",
        "uuid()",
        "now()",
        "current_timestamp",
        "current_timestamp()",
        "CURRENT_DATE",
        "localtimestamp",
        "unix_timestamp()",
        "monotonically_increasing_id()",
        "spark_partition_id()",
        "input_file_name()",
        "shuffle(tags)",
        "current_user()",
        "TIMESTAMP 'now'",
        "DATE 'today'",
        "DATE ' Today '",
        "TIMESTAMP 'tomorrow CET'",
        "CAST(('now') AS TIMESTAMP)",
        "try_cast('now' AS TIMESTAMP)",
        "to_date('today')",
        "to_timestamp( 'now' )",
        "try_to_date('yesterday')",
        "try_to_timestamp('now')",
        "date('today')",
        "datediff('today', ts)",
        "ts > 'now'",
        "ts BETWEEN 'yesterday' AND ts",
        "aes_encrypt(s.f, '0123456789abcdef')",
        "localtime()",
        "localtime",
        "s.f LIKE uuid()",
        "s.f NOT ILIKE uuid()",
        "s.f RLIKE uuid()",
        "java_method('java.lang.System', 'nanoTime')",
    ],
)
def test_non_deterministic_functions_are_refused(expression: str) -> None:
    found = check(f"SELECT {expression} AS x FROM rows").problems
    assert [f.reason for f in found] == ["NonDeterministic"], found


@pytest.mark.parametrize(
    "expression",
    [
        "s.f = 'now'",
        "coalesce(s.f, 'today')",
        "to_date(if(s.f = 'today', '2013-01-01', s.f))",
        "to_date('2013-01-01')",
        "s.f LIKE ANY ('now', 'today')",
        "s.f LIKE lower('NOW')",
    ],
)
def test_clock_words_in_other_strings_are_accepted(expression: str) -> None:
    assert check(f"SELECT {expression} AS x FROM rows").problems == ()


def test_a_column_named_like_a_function_without_parentheses_is_a_column() -> None:
    schema = ddl_to_schema("user STRING, n INT")
    assert check_sql("SELECT user FROM logs", {"logs": schema}).problems == ()


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT x FROM rows", "UnknownColumn"),
        ("SELECT s.z FROM rows", "UnknownColumn"),
        ("SELECT other.* FROM rows", "UnknownColumn"),
        ("SELECT n FROM rows WHERE m > 1", "UnknownColumn"),
        ("SELECT n AS m FROM rows WHERE m > 1", "UnknownColumn"),
        ("SELECT n FROM db.rows", "InvalidFrom"),
        ("SELECT n FROM parquet.`/tmp/x`", "InvalidFrom"),
        ("SELECT 1 AS n", "InvalidFrom"),
        ("SELECT id FROM range(10)", "InvalidFrom"),
        ("SELECT n + 1 FROM rows", "MissingAlias"),
        ("SELECT n, N FROM rows", "DuplicateColumn"),
        ("SELECT n AS __n FROM rows", "ReservedColumn"),
        ("SELECT foo(n) AS x FROM rows", "UnknownFunction"),
        ("SELECT session_window(ts, '1 hour') AS x FROM rows", "NotRowWise"),
        ("SELECT n FROM rows UNION ALL SELECT n, ts FROM rows", "UnionMismatch"),
        ("SELECT :p AS x FROM rows", "SqlDoesNotParse"),
        ("SELECT n FROM rows; SELECT n FROM rows", "SqlDoesNotParse"),
        ("", "SqlDoesNotParse"),
    ],
)
def test_each_mistake_has_its_reason(sql: str, reason: str) -> None:
    assert reason in [f.reason for f in check(sql).problems], check(sql).problems


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "SELECT window(ts, '1 h') AS w, count(*) AS n FROM rows GROUP BY window(ts, '1 h')",
            "window() groups rows by time",
        ),
        ("SELECT n FROM rows GROUP BY window(ts, '1 hour')", "window() groups rows by time"),
        (
            "SELECT * FROM TABLE(TUMBLE(TABLE rows, DESCRIPTOR(ts), INTERVAL '1' HOUR))",
            "tumble() groups rows by time",
        ),
        (
            "SELECT * FROM TABLE(HOP(TABLE rows, DESCRIPTOR(ts), INTERVAL '1' HOUR))",
            "hop() groups rows by time",
        ),
        ("SELECT session_window(ts, '30 minutes') AS w FROM rows", "session_window() groups rows"),
        ("SELEC n, s FROM rows", "it begins with SELEC"),
    ],
)
def test_what_users_of_spark_and_flink_write_first_is_answered(sql: str, message: str) -> None:
    first = check(sql).problems[0]
    assert message in first.message
    assert first.hint


def test_a_long_list_of_literals_costs_no_inference() -> None:
    schema = ddl_to_schema(", ".join(f"c{n} BIGINT" for n in range(500)))
    short, long = (f"SELECT c1 FROM rows WHERE c1 IN ({','.join('1' * n)})" for n in (100, 1600))
    assert cost_s(long, schema) < 30 * min(cost_s(short, schema) for _ in range(3))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a.n FROM a JOIN b ON a.n = b.n",
        "SELECT n FROM a WHERE n IN (SELECT n FROM b)",
        "SELECT n, (SELECT max(n) FROM b) AS m FROM a",
    ],
)
def test_a_refused_join_asks_for_no_union(sql: str) -> None:
    problems = check_sql(sql, {"a": SCHEMA, "b": SCHEMA}).problems
    assert {p.reason for p in problems} == {"NotRowWise"}
    assert any("join" in p.hint for p in problems)


@pytest.mark.parametrize(
    ("condition", "refused"),
    [
        ("n > 'sixty'", "'sixty' is compared with a number"),
        ("n IN (1, 'two')", "'two' is compared with a number"),
        ("n BETWEEN 1 AND 'b'", "'b' is compared with a number"),
        ("s.f = n", "s.f is compared with a number"),
        ("upper(s.f) < 7", "is compared with a number"),
        ("n > '60'", None),
        ("n = ('5')", None),
        ("n = '1.5'", "'1.5' is compared"),
        ("n = '1e1'", "'1e1' is compared"),
        ("price > '1.5'", None),
        ("CAST(n AS DOUBLE) = 'NaN'", None),
        ("CAST(n AS DOUBLE) <> '-Infinity'", None),
        ("n = CAST(s.f AS BIGINT)", None),
        ("s.f = 'sixty'", None),
        ("s.f IN ('1', '2')", None),
        ("ts > '2026-01-01'", None),
    ],
)
def test_strings_are_not_compared_with_numbers(condition: str, refused: str | None) -> None:
    problems = check(f"SELECT n FROM rows WHERE {condition}").problems
    assert [p.reason for p in problems] == (["NotANumber"] if refused else [])
    assert all(str(refused) in p.message for p in problems)


@pytest.mark.parametrize(
    "call",
    [
        "to_utc_timestamp(ts, '{}')",
        "from_utc_timestamp(ts, '{}')",
        "convert_timezone('{}', 'UTC', ts)",
        "convert_timezone('{}', ts)",
        "make_timestamp(2026, 1, 2, 3, 4, 5, '{}')",
        "make_timestamp_ltz(2026, 1, 2, 3, 4, 5, '{}')",
    ],
)
def test_time_zones_are_those_of_expressions(call: str) -> None:
    for zone in ("Europe/Paris", "America/Coyhaique", "UTC", "Z", "+02:00", "GMT-3", "UTC+05:30"):
        assert not check(f"SELECT {call.format(zone)} AS x FROM rows").problems
    for zone in ("No/Such", "europe/paris", "PST", "", "../UTC", "+19:00", "+18:30", "GMT+99"):
        (problem,) = check(f"SELECT {call.format(zone)} AS x FROM rows").problems
        assert (problem.reason, problem.message) == (
            "UnknownTimeZone",
            f"unknown time zone {zone!r}",
        )
    with_column = "SELECT to_utc_timestamp('2026-01-01 No/Such', s.z) AS x FROM rows"
    assert "UnknownTimeZone" not in [p.reason for p in check(with_column).problems]


def test_every_input_has_to_be_read() -> None:
    inputs = {"a": SCHEMA, "b": SCHEMA}
    (problem,) = check_sql("SELECT n FROM a", inputs).problems
    assert (problem.reason, problem.hint) == ("UnreadInput", "add UNION ALL SELECT ... FROM b")
    both = check_sql("SELECT n FROM b UNION ALL SELECT n FROM a", inputs)
    assert (both.problems, both.reads) == ((), ("b", "a"))


def test_an_unknown_input_is_not_checked() -> None:
    report = check_sql("SELECT anything FROM a", {"a": None})
    assert (report.problems, report.schema) == ((), None)


@pytest.mark.parametrize(
    ("opens", "closes"),
    [("(", ")"), ("abs(", ")"), ("NOT ", ""), ("- ", ""), ("CASE WHEN true THEN ", " END")],
)
@pytest.mark.parametrize("depth", [150, 1500])
def test_too_deep_expressions_are_refused(opens: str, closes: str, depth: int) -> None:
    report = check(f"SELECT {opens * depth}n{closes * depth} AS x FROM rows")
    assert [f.reason for f in report.problems] == ["TooDeep"]


def test_a_cast_to_a_too_deep_type_is_refused() -> None:
    cast = f"CAST(n AS {'ARRAY<' * 40}INT{'>' * 40})"
    cast = f"SELECT {'abs(' * 70}{cast}{')' * 70} AS x FROM rows"
    assert [f.reason for f in check(cast).problems] == ["TooDeep"]


@pytest.mark.parametrize("operator", [" + ", " OR ", " || "])
def test_a_long_chain_of_one_operator_is_accepted(operator: str) -> None:
    chain = operator.join(["n"] * 300)
    assert not check(f"SELECT {chain} AS x FROM rows").problems


def cost_s(sql: str, schema: Schema = SCHEMA) -> float:
    """CPU time; the operator validates all topologies in one thread."""
    began = time.thread_time()
    check_sql(sql, {"rows": schema})
    return time.thread_time() - began


@pytest.mark.parametrize("operator", [" = ", " + ", " OR ", " || "])
def test_a_long_chain_is_checked_in_linear_time(operator: str) -> None:
    """Of eight times the terms, quadratic cost would be 64 times as much."""
    short, long = (f"SELECT {operator.join(['n'] * terms)} AS x FROM rows" for terms in (125, 1000))
    assert cost_s(long) < 25 * min(cost_s(short) for _ in range(3))


def test_the_types_of_a_long_chain_of_comparisons_are_known() -> None:
    report = check("SELECT n = n = true AS x FROM rows")
    assert report.schema is not None
    assert report.schema.field("x").type is Scalar.BOOLEAN


def test_the_type_of_a_huge_expression_is_unknown() -> None:
    report = check(f"SELECT {' + '.join(['n'] * 1000)} AS x, n + 1 AS y FROM rows")
    assert report.schema is not None
    assert [f.type for f in report.schema] == [None, Scalar.BIGINT]


def test_a_wide_select_is_checked_in_linear_time() -> None:
    wide = ddl_to_schema(", ".join(f"c{n} INT" for n in range(500)))
    items = ", ".join(f"c{n} + 1 AS d{n}" for n in range(200))
    assert cost_s(f"SELECT {items} FROM rows", wide) < 2.5


def test_stars_cannot_repeat_columns_without_end() -> None:
    wide = ddl_to_schema(", ".join(f"c{n} INT" for n in range(1000)))
    report = check_sql(f"SELECT {', '.join(['*'] * 5000)} FROM rows", {"rows": wide})
    assert [p.reason for p in report.problems] == ["TooMany"]


@pytest.mark.parametrize("name", ["x{}", "ff{}(n) AS x{}"])
def test_the_first_unknown_names_are_reported(name: str) -> None:
    items = ", ".join(name.format(n, n) for n in range(60))
    assert len(check(f"SELECT {items} FROM rows").problems) == 20
