"""Runs one SQL text over Arrow tables on Spark, and classifies failures. For use by one thread."""

from __future__ import annotations

import contextlib
import errno
import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rekindle.engine.failure import DiskFull, EngineUnavailable, OutOfMemory, describe_exit
from rekindle.engine.spark.planned import PlannedQuery, Planner
from rekindle.engine.spark.plans import AggregationOrder
from rekindle.engine.spark.session import BATCH_ROWS, current_jvm
from rekindle.errors import OperatorFailed

_JVM_EXIT_TIMEOUT_S = 5.0
"""How long a JVM may take to end after its sockets closed, or after it ran out of memory."""
_FAILURES = (PySparkException, Py4JError, OSError, EOFError, pa.ArrowException, MemoryError)
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_SPACE_TEXTS = ("No space left on device", "Disk quota exceeded")
_DISK_FULL_MESSAGE = "no space left on the local disk for temporary files"
_PY4J_CALL = "An error occurred while calling"
_JAVA_EXCEPTION = re.compile(r"(?:[a-z]\w*\.)+([A-Z][\w$]*): ")
_NO_MEMORY_TEXTS = (
    "OutOfMemory",  # of Java, Spark and Arrow
    "OutOfDirectMemory",  # of Netty, which holds Arrow's buffers
    "UNABLE_TO_ACQUIRE_MEMORY",
    "exceeds maximum allowed buffer",
    "_CANNOT_GROW_BUFFER",
    "NegativeArraySizeException",  # an array above 2 GB
)


class SqlRunner:
    """Queries of one Spark session, whose views are separate from those of others."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._planner = Planner(session)
        self._planned: dict[tuple[object, ...], PlannedQuery | None] = {}
        self.cores: int = session.sparkContext.defaultParallelism
        self.jobs = 0
        """Number of Spark jobs so far."""

    def run(self, sql: str, views: Mapping[str, pa.Table], what: str) -> pa.Table:
        """Raises OperatorFailed, which begins with `what`, OutOfMemory, DiskFull, or
        EngineUnavailable."""
        rows = self._run(sql, views, what, in_order=False)
        assert rows is not None
        return rows

    def run_hashed(self, sql: str, views: Mapping[str, pa.Table], what: str) -> pa.Table | None:
        """As `run`, with hash aggregation in the order of rows; None if rows may have been
        aggregated in another order, as when a hash map was full."""
        return self._run(sql, views, what, in_order=True)

    def _run(
        self, sql: str, views: Mapping[str, pa.Table], what: str, *, in_order: bool
    ) -> pa.Table | None:
        try:
            with _failures(what):
                if planned := self._planned_for(sql, views):
                    return self._run_planned(planned, views, in_order)
                return self._run_once(sql, views, in_order)
        finally:
            # Py4J's objects are reference cycles: until Python collects them, which may take a
            # dozen epochs, the JVM keeps the rows. The objects are recent, so a collection of the
            # young generation is enough.
            gc.collect(generation=1)

    def _run_planned(
        self, planned: PlannedQuery, views: Mapping[str, pa.Table], in_order: bool
    ) -> pa.Table | None:
        def run() -> pa.Table:
            return self._job(lambda: planned.run(views))

        return planned.aggregation_order.result_if_in_order(run) if in_order else run()

    def _run_once(self, sql: str, views: Mapping[str, pa.Table], in_order: bool) -> pa.Table | None:
        """As `_run_planned`, for a query whose plan must not be run twice: Spark plans it again."""
        try:
            frame = self._frame(sql, views)
            if not in_order:
                return self._job(frame.toArrow)
            plan = frame._jdf.queryExecution().executedPlan()
            return AggregationOrder(plan).result_if_in_order(lambda: self._job(frame.toArrow))
        finally:
            with contextlib.suppress(Py4JError, OSError):  # the JVM may be dead
                for name in views:  # views keep their rows
                    self._session.catalog.dropTempView(name)

    def _job(self, run: Callable[[], pa.Table]) -> pa.Table:
        self.jobs += 1
        return run()

    def _planned_for(self, sql: str, views: Mapping[str, pa.Table]) -> PlannedQuery | None:
        rows = max((table.num_rows for table in views.values()), default=0)
        spark_tasks = min(self.cores, max(1, -(-rows // BATCH_ROWS)))
        return self._plan(sql, {name: table.schema for name, table in views.items()}, spark_tasks)

    def _plan(
        self, sql: str, views: Mapping[str, pa.Schema], spark_tasks: int
    ) -> PlannedQuery | None:
        key = (sql, spark_tasks, *views.items())
        if key not in self._planned:
            self._planned[key] = self._planner.plan(sql, views, partitions=spark_tasks)
        return self._planned[key]

    def analyze(
        self,
        sql: str,
        views: Mapping[str, pa.Schema],
        what: str,
        check: Callable[[DataFrame], None] = lambda _: None,
    ) -> pa.Schema:
        """The Arrow schema of the result of `run`, with all fields nullable; runs no job. `check`
        may raise errors about the analysed query."""
        from pyspark.sql.pandas.types import to_arrow_schema

        with _failures(what):
            frame = self._frame(sql, {n: s.empty_table() for n, s in views.items()})
            check(frame)
            return to_arrow_schema(frame.schema, timezone="UTC")

    def _frame(self, sql: str, views: Mapping[str, pa.Table]) -> DataFrame:
        for name, table in views.items():
            self._session.createDataFrame(table).createOrReplaceTempView(f"`{name}`")
        return self._session.sql(sql)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise _classify(error, what) from error


def _classify(error: Exception, what: str) -> Exception:
    """Converts a failure to DiskFull, EngineUnavailable (the JVM has exited), OutOfMemory, or
    OperatorFailed."""
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return DiskFull(f"{what}: {_DISK_FULL_MESSAGE}: {error}")
    lines = _lines(error)
    no_memory = _first_with(lines, _NO_MEMORY_TEXTS)
    if no_memory or not isinstance(
        error, PySparkException
    ):  # other errors do not say whether the JVM exited
        _wait_for_jvm_exit()
    jvm = current_jvm()
    if jvm is not None and not jvm.alive:
        status = jvm.process.returncode
        return EngineUnavailable(f"{describe_exit(status, jvm.spec.heap)}, during {what}", status)
    if line := _first_with(lines, _NO_SPACE_TEXTS):
        return DiskFull(f"{what}: {_DISK_FULL_MESSAGE}: {line}")
    if no_memory:
        return OutOfMemory(f"{what}: Spark ran out of memory: {no_memory}")
    message = _cause(lines) or type(error).__name__
    if isinstance(error, MemoryError):
        return OutOfMemory(f"{what}: Python ran out of memory: {message}")
    return OperatorFailed(f"{what}: {message}")


def _lines(error: Exception) -> list[str]:
    """The lines of an error's text; [] if Py4J cannot read it, because the JVM does not respond."""
    try:
        return str(error).strip().splitlines()
    except Exception:
        return []


def _cause(lines: Sequence[str]) -> str:
    """The cause in an error's text. Py4J's first line only names a call of PySpark, and its second
    line all exceptions, of which the last is the cause."""
    if len(lines) < 2 or not lines[0].startswith(_PY4J_CALL):
        return lines[0] if lines else ""
    _, *named = _JAVA_EXCEPTION.split(lines[1])
    if not named:
        return lines[1]
    name, message = named[-2:]
    return message if name == "SparkException" else f"{name}: {message}"


def _wait_for_jvm_exit() -> None:
    """Wait for a JVM that closed its sockets, or had an OutOfMemoryError, to exit."""
    deadline = time.monotonic() + _JVM_EXIT_TIMEOUT_S
    while (jvm := current_jvm()) is not None and jvm.alive and time.monotonic() < deadline:
        time.sleep(0.02)


def _first_with(lines: Sequence[str], texts: Sequence[str]) -> str | None:
    """The first line with one of the texts; in a Java stack trace it is the cause."""
    return next((line.strip()[:300] for line in lines if any(t in line for t in texts)), None)
