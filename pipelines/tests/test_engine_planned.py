"""Queries that are planned once: the same rows as when planned for each epoch, or not planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from spark_parts import StartSession

from rekindle.engine.failure import EngineUnavailable
from rekindle.errors import OperatorFailed

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

from rekindle.engine.spark import planned
from rekindle.engine.spark.planned import Planner
from rekindle.engine.spark.query import SqlRunner
from rekindle.engine.spark.session import (
    BATCH_ROWS,
    current_jvm,
    stop_session,
)

pytestmark = pytest.mark.spark

SCHEMA = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("v", pa.float64()),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("t", pa.timestamp("us", "UTC")),
        pa.field("d", pa.date32()),
        pa.field("parts", pa.list_(pa.int32())),
    ]
)
NOON = datetime(2013, 7, 1, 12, tzinfo=UTC)


def rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    columns = [
        [f"k{i % 3}" if i % 5 else None for i in numbers],
        [i / 7 if i % 4 else None for i in numbers],
        list(numbers),
        [NOON + timedelta(minutes=i) if i % 6 else None for i in numbers],
        [(NOON + timedelta(days=i)).date() for i in numbers],
        [list(range(i % 3)) for i in numbers],
    ]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


@pytest.fixture(scope="module")
def session(start_shared: StartSession) -> Iterator[SparkSession]:
    started = start_shared("test", master="local[2]")
    yield started
    stop_session(started, keep_jvm=True)


ROW_WISE = "SELECT k, v * 2 AS v2, n, t, date_add(d, 1) AS d, parts FROM a WHERE n % 3 != 1"
EXPLODED = "SELECT n, monotonically_increasing_id() AS at, explode(parts) AS part FROM a"
TWO = "SELECT n, k FROM b UNION ALL SELECT n * 10 AS n, k FROM a"
GROUPS = "SELECT k, count(1) AS c, sum(v) AS s FROM (SELECT /*+ COALESCE(1) */ * FROM a) GROUP BY k"
SORTED = (
    "SELECT k, count(1) AS c, min(k) AS m FROM"
    " (SELECT /*+ COALESCE(1) */ * FROM a SORT BY k) GROUP BY k"
)


@pytest.mark.parametrize("sql", [ROW_WISE, GROUPS, SORTED])
def test_an_epoch_without_rows_does_not_end_the_input(session: SparkSession, sql: str) -> None:
    """Spark's aggregates would read no batch after one without rows."""
    table = pa.concat_tables([rows(0, 30), rows(0, 9).slice(4, 0), rows(30, 40)])
    found = SqlRunner(session.newSession()).run(sql, {"a": table}, "operator x")
    assert found.to_pylist() == unplanned(session, sql, {"a": table}).to_pylist()


def unplanned(session: SparkSession, sql: str, views: Mapping[str, pa.Table]) -> pa.Table:
    for name, table in views.items():
        session.createDataFrame(table.combine_chunks()).createOrReplaceTempView(name)
    return session.sql(sql).toArrow()


@pytest.mark.parametrize(
    ("sql", "partitions"),
    # Ids differ if rows are divided in another way.
    [(ROW_WISE, 1), (ROW_WISE, 3), (EXPLODED, 1), (TWO, 3), (GROUPS, 3), (SORTED, 3)],
)
def test_a_planned_query_equals_an_unplanned_one(
    session: SparkSession, sql: str, partitions: int
) -> None:
    query = Planner(session).plan(sql, {"a": SCHEMA, "b": SCHEMA}, partitions)
    assert query is not None
    chunks = pa.concat_tables([rows(50, 4), rows(60, 5)])
    for a, b in [
        (rows(0, 40), rows(100, 7)),
        (rows(40, 3), rows(0, 0)),
        (rows(0, 0), rows(0, 0)),
        (chunks, rows(7, 1)),
        (rows(0, 40), rows(100, 7)),
    ]:
        views = {"a": a, "b": b}
        found = query.run(views)
        assert found.equals(unplanned(session, sql, views))
        assert found.num_rows > 0 or not a.num_rows


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT k, count(1) AS c FROM (SELECT /*+ REPARTITION(8, k) */ * FROM a) GROUP BY k",
        "SELECT n FROM a WHERE n = (SELECT max(n) FROM b)",
        "SELECT a.n FROM a JOIN b ON a.n = b.n",
        "SELECT n FROM a ORDER BY n LIMIT 3",
    ],
)
def test_plans_that_keep_something_between_runs_are_planned_again(
    session: SparkSession, sql: str
) -> None:
    assert Planner(session).plan(sql, {"a": SCHEMA, "b": SCHEMA}) is None
    query = SqlRunner(session.newSession())
    for views in ({"a": rows(0, 9), "b": rows(5, 3)}, {"a": rows(2, 4), "b": rows(3, 3)}):
        assert query.run(sql, views, "test").equals(unplanned(session, sql, views))


def test_a_schema_that_spark_would_change_is_planned_again(session: SparkSession) -> None:
    naive = pa.schema([pa.field("t", pa.timestamp("us"))])
    assert Planner(session).plan("SELECT t FROM a", {"a": naive}) is None
    noon = pa.table([pa.array([NOON.replace(tzinfo=None)], pa.timestamp("us"))], schema=naive)
    found = SqlRunner(session.newSession()).run("SELECT t FROM a", {"a": noon}, "test")
    assert found.column("t").to_pylist() == [NOON]


def test_more_than_a_batch_has_a_task_for_each_core(session: SparkSession) -> None:
    query = SqlRunner(session.newSession())
    sql = "SELECT n, spark_partition_id() AS p FROM a"
    for rows, tasks in [(1, 1), (BATCH_ROWS, 1), (BATCH_ROWS + 1, 2), (2 * BATCH_ROWS + 1, 2)]:
        numbers = pa.array(range(rows), pa.int64())
        found = query.run(sql, {"a": pa.table({"n": numbers})}, "test")
        assert set(found.column("p").to_pylist()) == set(range(tasks))
        assert found.column("n").combine_chunks() == numbers


def test_a_query_that_is_planned_again_leaves_no_view(session: SparkSession) -> None:
    again = session.newSession()
    sql = "SELECT n FROM `a-b` ORDER BY n LIMIT 3"
    assert SqlRunner(again).run(sql, {"a-b": pa.table({"n": [1, 2]})}, "test").num_rows
    assert again.catalog.listTables() == []  # which would keep the rows


def test_a_row_that_fails_names_the_operator_and_leaves_nothing(session: SparkSession) -> None:
    query = SqlRunner(session.newSession())
    sql = "SELECT n, if(n = 3, raise_error('three'), 'fine') AS said FROM a"
    for _ in range(2):
        with pytest.raises(OperatorFailed, match=r"^operator x, epoch 7: .*three"):
            query.run(sql, {"a": rows(1, 5)}, "operator x, epoch 7")
        found = query.run(sql, {"a": rows(4, 5)}, "operator x, epoch 8")
        assert found.column("n").to_pylist() == [4, 5, 6, 7, 8]


def test_sql_that_spark_refuses_names_the_operator(session: SparkSession) -> None:
    with pytest.raises(OperatorFailed, match=r"^operator x: .*nothing_such"):
        SqlRunner(session.newSession()).run("SELECT nothing_such", {"a": rows(1, 2)}, "operator x")


def test_tasks_see_the_settings_of_the_session(session: SparkSession) -> None:
    legacy = session.newSession()
    legacy.conf.set("spark.sql.legacy.timeParserPolicy", "LEGACY")
    for pattern in ("'u'", "if(n > 0, 'u', 'y')"):  # read during planning, and in a Spark task
        sql = f"SELECT date_format(t, {pattern}) AS day FROM a"
        query = Planner(legacy).plan(sql, {"a": SCHEMA})
        assert query is not None
        assert query.run({"a": rows(1, 2)}).column("day").to_pylist() == ["1", "1"]  # a Monday


def test_settings_that_only_pysparks_transfer_of_rows_obeys_are_respected(
    session: SparkSession,
) -> None:
    other = session.newSession()
    other.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    assert Planner(other).plan(ROW_WISE, {"a": SCHEMA}) is None
    found = SqlRunner(other).run("SELECT k FROM a", {"a": rows(1, 3)}, "test")
    assert found.column("k").to_pylist() == rows(1, 3).column("k").to_pylist()


def test_a_jvm_that_dies_while_sending_is_an_error(
    session: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: it kills the JVM."""
    query = SqlRunner(session.newSession())
    assert query.run(ROW_WISE, {"a": rows(0, 9)}, "test").num_rows

    @contextmanager
    def ends_early(info: object, serializer: object) -> Iterator[Iterator[bytes]]:
        jvm = current_jvm()
        assert jvm is not None
        jvm.process.kill()
        jvm.process.wait()
        yield iter([])

    monkeypatch.setattr(planned, "_load_from_socket", ends_early)
    with pytest.raises(EngineUnavailable):
        query.run(ROW_WISE, {"a": rows(0, 9)}, "test")
