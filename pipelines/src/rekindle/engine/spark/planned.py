"""A query that Spark plans once and runs for the rows of each epoch.

Spark's data frames contain their rows: new rows are a new frame, which Spark analyses, optimises,
plans and compiles again; that is most of the CPU of a small epoch. A step's text and the types of
its rows never change, so here the plan is made once, without rows, and an epoch's rows are put into
the partitions of the RDDs that the plan scans (docs/decisions/0026). That is correct for plans
without state; those that keep something between runs, like the files of a shuffle, are not planned
here.

It uses internal classes of Spark, of the pinned version.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark.serializers import NoOpSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.util import _load_from_socket

from rekindle.engine.spark.plans import (
    ORDER_PRESERVING_CLASSES,
    AggregationOrder,
    class_name,
    each,
    operators,
)
from rekindle.engine.spark.session import BATCH_ROWS

log = logging.getLogger(__name__)

_STATELESS = ORDER_PRESERVING_CLASSES | {"ObjectHashAggregateExec", "SortAggregateExec", "SortExec"}
"""Classes of Spark's physical plans without state between two runs."""


class ArrowTransfer:
    """Transfers Arrow tables to the JVM through a file, as PySpark does."""

    def __init__(self, session: SparkSession) -> None:
        self._directory = session.sparkContext._temp_dir
        self._read = _jvm(session).PythonSQLUtils.readArrowStreamFromFile

    def batches(self, table: pa.Table) -> JavaObject:
        """An iterator, in the JVM, of at least one batch. Spark takes a batch without rows for the
        end: a table of several epochs has one where an epoch without rows is not copied."""
        batches = [b for b in table.to_batches(max_chunksize=BATCH_ROWS) if b.num_rows]
        return self._sent(table.schema, batches or [_no_rows(table.schema)])

    def no_rows(self, schema: pa.Schema, batches: int) -> JavaObject:
        """An iterator of `batches` empty batches."""
        return self._sent(schema, [_no_rows(schema)] * batches)

    def _sent(self, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> JavaObject:
        with tempfile.NamedTemporaryFile(dir=self._directory) as file:
            with pa.ipc.new_stream(file, schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)
            file.flush()
            return self._read(file.name)


class Planner:
    """Plans queries of one session."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._jvm = _jvm(session)
        self._transfer = ArrowTransfer(session)

    def plan(
        self, sql: str, views: Mapping[str, pa.Schema], partitions: int = 1
    ) -> PlannedQuery | None:
        """Plans `sql` over views with these schemas; None if its plan must not be run twice.
        Creates temporary views of these names, with `partitions` partitions each.

        Raises what Spark raises for SQL that it refuses.
        """
        self._jvm.SparkSession.setActiveSession(
            self._session._jsparkSession
        )  # its settings are used
        if self._needs_other_transfer:
            return None
        if any(_spark_schema(schema) != schema for schema in views.values()):
            return None
        frames = {
            name: self._frame_without_rows(schema, partitions) for name, schema in views.items()
        }
        for name, frame in frames.items():
            frame.createOrReplaceTempView(f"`{name}`")
        frame = self._session.sql(sql)
        try:
            if not _is_stateless(frame._jdf.queryExecution().executedPlan()):
                return None
            scanned = {name: _partitions(frame) for name, frame in frames.items()}
            return PlannedQuery(frame, scanned, self._transfer, self._properties)
        except Py4JError as error:
            if type(error) is not Py4JError:  # a failure, not a missing method
                raise
            log.warning(
                "this version of Spark plans each epoch again, which takes three times the CPU: %s",
                error,
            )
            return None

    def _frame_without_rows(self, schema: pa.Schema, partitions: int) -> DataFrame:
        """A frame over empty batches, each of which is a partition: without any batch Spark would
        plan an empty relation."""
        types = from_arrow_schema(schema, prefer_timestamp_ntz=False).json()
        batches = self._transfer.no_rows(schema, partitions)
        to_frame = self._jvm.PythonSQLUtils.toDataFrame
        return DataFrame(to_frame(batches, types, self._session._jsparkSession), self._session)

    @cached_property
    def _needs_other_transfer(self) -> bool:
        """Whether the user's settings require what `ArrowTransfer` cannot do: Arrow's large types
        (offsets of 64 bits), or encrypted files."""
        large = self._session.conf.get("spark.sql.execution.arrow.useLargeVarTypes")
        return large == "true" or self._session.sparkContext._encryption_enabled

    @cached_property
    def _properties(self) -> JavaObject:
        """The session's settings as local properties, which Spark passes to the tasks of a job."""
        properties = self._jvm.java.util.Properties()
        settings = self._session._jsparkSession.sessionState().conf().getAllConfs()
        for setting in each(settings):
            if setting._1().startswith("spark"):
                properties.setProperty(setting._1(), setting._2())
        return properties


class PlannedQuery:
    """One SQL text over views of fixed Arrow schemas, each with a fixed number of partitions."""

    def __init__(
        self,
        frame: DataFrame,
        partitions: Mapping[str, Sequence[JavaObject]],
        transfer: ArrowTransfer,
        properties: JavaObject,
    ) -> None:
        self._partitions = partitions
        self._transfer = transfer
        self._properties = properties
        self._plan = frame._jdf.queryExecution().executedPlan()
        self._schema = to_arrow_schema(frame.schema, timezone="UTC")
        self._rdd = frame._jdf.toArrowBatchRdd()
        self._context = frame.sparkSession.sparkContext._jsc.sc()
        self._collect = _jvm(frame.sparkSession).PythonRDD.collectAndServe
        # The empty batches that the plan was made with.
        self._empty_values = {name: found[0].values() for name, found in partitions.items()}

    @cached_property
    def aggregation_order(self) -> AggregationOrder:
        return AggregationOrder(self._plan)

    def run(self, views: Mapping[str, pa.Table]) -> pa.Table:
        """`views`: a table for each view, with the planned schema. Raises what Spark and Py4J
        raise."""
        self._context.setLocalProperties(self._properties)
        try:
            for name, table in views.items():
                partitions = self._partitions[name]
                for partition, part in zip(
                    partitions, _divided(table, len(partitions)), strict=True
                ):
                    _put(partition, self._transfer.batches(part).toVector())
            batches = self._batches()
        finally:
            with contextlib.suppress(Py4JError, OSError):  # the JVM may be dead
                for name in views:  # otherwise it would keep the rows until the next run
                    for partition in self._partitions[name]:
                        _put(partition, self._empty_values[name])
        return pa.Table.from_batches(batches, self._schema)

    def _batches(self) -> list[pa.RecordBatch]:
        port, secret, server = self._collect(self._rdd)
        try:
            with _load_from_socket((port, secret), NoOpSerializer()) as messages:
                return [pa.ipc.read_record_batch(m, self._schema) for m in messages]
        finally:
            server.getResult()  # raises if not everything was sent; the messages would just end


def _put(partition: JavaObject, batches: JavaObject) -> None:
    """Replace the rows of an RDD's partition: by the setter of its Scala variable `values`."""
    getattr(partition, "values_$eq")(batches)


def _divided(table: pa.Table, parts: int) -> Iterator[pa.Table]:
    """The table in `parts` parts of consecutive rows, in order."""
    rows = -(-table.num_rows // parts)
    return (table.slice(part * rows, rows) for part in range(parts))


def _jvm(session: SparkSession) -> Any:
    return session.sparkContext._jvm


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([pa.array([], field.type) for field in schema], schema)


def _spark_schema(schema: pa.Schema) -> pa.Schema:
    """The Arrow schema that Spark would use for this one. If they differ, PySpark converts tables,
    which is not done here."""
    return to_arrow_schema(from_arrow_schema(schema, prefer_timestamp_ntz=False), timezone="UTC")


def _is_stateless(plan: JavaObject) -> bool:
    without_subqueries = plan.subqueriesAll().isEmpty()
    return without_subqueries and all(class_name(o) in _STATELESS for o in operators(plan))


def _partitions(frame: DataFrame) -> list[JavaObject]:
    """The partitions of the RDD from which a frame was created; they contain its rows."""
    rdd = frame._jdf.queryExecution().analyzed().rdd()
    while not (dependencies := rdd.dependencies()).isEmpty():
        rdd = dependencies.head().rdd()
    return list(rdd.partitions())
