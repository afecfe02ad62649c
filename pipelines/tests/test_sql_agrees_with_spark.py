"""Checks of SQL without Spark agree with Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from spark_parts import StartSession

from rekindle.arrow_types import arrow_schema, arrow_type
from rekindle.topology.sql import functions
from rekindle.topology.sql.aggregates import decompose
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.row_wise import check_sql

pytestmark = pytest.mark.spark

DDL = (
    "n BIGINT, tags ARRAY<STRUCT<k: INT>>, s STRUCT<f: STRING, g: STRUCT<h: INT>>, ts TIMESTAMP, "
    "`a b` STRING, price DECIMAL(10, 2), tiny TINYINT, small SMALLINT, f FLOAT, d DOUBLE, "
    "b BOOLEAN, bin BINARY, day DATE"
)
QUERIES = [
    "SELECT * FROM rows",
    "SELECT * EXCEPT (n, tags) FROM rows",
    "SELECT r.* FROM rows r WHERE r.n > 1",
    "SELECT s.*, s.g.h, rows.s.f AS x FROM rows",
    "SELECT N, `a b` FROM ROWS",
    "SELECT n + 1 AS a, a * 2 AS b FROM rows",
    "SELECT explode(tags) FROM rows",
    "SELECT n, posexplode(tags) FROM rows",
    "SELECT posexplode(tags) AS (p, c) FROM rows",
    "SELECT n, t.k FROM rows LATERAL VIEW explode(tags) x AS t",
    "SELECT * FROM rows LATERAL VIEW OUTER posexplode(tags) x AS p, t WHERE p > 0",
    "SELECT n FROM rows UNION ALL SELECT n * 2 AS m FROM rows",
    "SELECT n / 2 AS half, date_trunc('DAY', ts) AS day, n > 1 AS many, upper(s.f) AS f, "
    "CAST(n AS STRING) AS t, ts + INTERVAL 1 HOUR AS later, year(ts) AS y, n % 2 AS odd, "
    "price * 2 AS p, "
    "CASE WHEN n > 1 THEN 'a' ELSE 'b' END AS c, coalesce(f, d) AS e, -n AS m FROM rows",
    "SELECT array_position(array(n), 1) AS a, array_position(array(n), 1) + 1 AS b, "
    "trunc(day, 'MM') AS c, coalesce(trunc(day, 'MM'), day) AS d1, round(price, 1) AS e, "
    "round(n) AS f1, round(price, 1) * 2 AS g, 1.5 AS h, 1.5 * n AS i, array(1, 2.5) AS j, "
    "timestampdiff(SECOND, ts, ts) AS k, date_diff(DAY, ts, ts) AS l, datediff(day, day) AS m, "
    "extract(SECOND FROM ts) AS o, getbit(n, 1) AS p, bin || bin AS q, s.f || n AS r, "
    "if(b, 1, NULL) AS s1, try_divide(price, 2) AS t, CAST(1.5 * n AS BIGINT) AS u, "
    "n > 1.5 AS v, round(d, 1) AS w, concat(round(d, 1), 'x') AS x FROM rows",
]
AGGREGATES = [
    "count(*)",
    "count(x)",
    "sum(x)",
    "avg(x)",
    "min(x)",
    "max(x)",
    "count_if(x > 1)",
    "bool_and(x > 1)",
    "some(x > 1)",
    "avg(x) FILTER (WHERE x > 1)",
    "sum(x) / count(*)",
    "round(avg(x), 2)",
    "coalesce(max(x), 0) - min(x)",
    "sum(p)",
    "sum(i)",
]


@pytest.fixture(scope="module")
def spark(start_shared: StartSession) -> Iterator[Any]:
    """The engine's own session, as it runs a topology's SQL."""
    from rekindle.engine.spark.session import stop_session

    session = start_shared("sql", conf={"spark.sql.shuffle.partitions": "1"})
    session.createDataFrame([], DDL).createOrReplaceTempView("rows")
    yield session
    stop_session(session, keep_jvm=True)


def arrow(frame: Any) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(frame.schema, timezone="UTC")


def test_ddl_has_the_same_types_in_spark(spark: Any) -> None:
    theirs = arrow(spark.table("rows"))
    assert ddl_to_schema(DDL).names == theirs.names
    assert arrow_schema(ddl_to_schema(DDL)).types == theirs.types


@pytest.mark.parametrize("sql", QUERIES)
def test_output_columns_are_those_of_spark(spark: Any, sql: str) -> None:
    report = check_sql(sql, {"rows": ddl_to_schema(DDL)})
    theirs = arrow(spark.sql(sql))
    assert report.problems == ()
    assert report.schema is not None
    assert report.schema.names == theirs.names
    for field in report.schema:
        if field.type is not None:
            assert arrow_type(field.type) == theirs.field(field.name).type, field.name


def test_merged_partials_give_what_spark_gives_at_once(spark: Any) -> None:
    """Two panes with rows, one with NULLs only; and a group that has nothing but NULLs."""
    rows = (
        "SELECT * FROM VALUES (1, 1, 1.5D, 1.25, 7), (1, 2, 2.5D, 2.5, 8), (1, 2, 0.5D, NULL, 9), "
        "(1, 3, NULL, NULL, NULL), (2, 1, NULL, NULL, NULL) AS t(g, pane, x, p, i)"
    )
    spark.sql(rows).createOrReplaceTempView("t")
    text = ", ".join(f"{item} AS r{at}" for at, item in enumerate(AGGREGATES))
    parts = decompose(text)
    partials = ", ".join(f"{p.sql} AS {p.name}" for p in parts.partials)
    merges = ", ".join(f"{p.merge}({p.name}) AS {p.name}" for p in parts.partials)
    outputs = ", ".join(f"{sql} AS `{alias}`" for alias, sql in parts.outputs)
    merged = (
        f"SELECT g, {outputs} FROM (SELECT g, {merges} FROM "
        f"(SELECT g, pane, {partials} FROM t GROUP BY g, pane) GROUP BY g) ORDER BY g"
    )
    direct = f"SELECT g, {text} FROM t GROUP BY g ORDER BY g"
    assert spark.sql(merged).collect() == spark.sql(direct).collect()


def test_the_table_of_functions_is_sparks(spark: Any) -> None:
    registry = spark._jsparkSession.sessionState().functionRegistry()
    names = registry.listFunction().iterator()
    theirs = set()
    while names.hasNext():
        theirs.add(names.next().funcName())
    words = {name for name in theirs if name[0].isalpha()}
    grammar = {"and", "between", "case", "div", "ilike", "in", "like", "not", "or", "rlike", "when"}
    assert words - functions.KNOWN <= grammar
