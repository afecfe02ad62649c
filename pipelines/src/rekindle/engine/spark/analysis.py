"""Spark's analysis of a topology's nodes: schemas, and operators with state. Runs no job.

The compiler infers types without Spark and may leave some unknown, so a chain analyses all nodes
with Spark, sources first; every task gets the same result.

Design: docs/design/engine.md#sql.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from rekindle.arrow_types import arrow_schema
from rekindle.engine.epochs import EPOCH, SYSTEM_COLUMNS
from rekindle.engine.operators.base import Aggregation, Operator, view_name
from rekindle.engine.operators.registry import has_state, open_operator
from rekindle.engine.spark.query import SqlRunner
from rekindle.engine.spark.steps import Step, step_sql
from rekindle.engine.spark.unsupported import unsupported_column, unsupported_expression
from rekindle.errors import OperatorFailed, OperatorRefused
from rekindle.topology.model import Node, Topology
from rekindle.topology.spec import OperatorSpec


class Analyzer:
    """Analyzes each node once, from its inputs' schemas. Raises OperatorRefused."""

    def __init__(self, topology: Topology, sql_runner: SqlRunner) -> None:
        self._topology = topology
        self._sql_runner = sql_runner
        self._schemas: dict[str, pa.Schema] = {}
        self._operators: dict[str, Operator] = {}

    def schema(self, name: str) -> pa.Schema:
        """The schema of a node's rows, all columns nullable."""
        if name not in self._schemas:
            node = self._topology.nodes[name]
            if isinstance(node.spec, OperatorSpec):
                self._schemas[name] = self._output(node)
            else:
                self._schemas[name] = arrow_schema(node.schema)
        return self._schemas[name]

    def operator(self, node: Node) -> Operator:
        """The operator of a node that has state."""
        if node.name not in self._operators:
            inputs = [self.schema(name) for name in node.inputs]
            analyze = partial(self._analyze_sql, operator=node.name)
            self._operators[node.name] = open_operator(node, self._topology, inputs, analyze)
        return self._operators[node.name]

    def _output(self, node: Node) -> pa.Schema:
        system = SYSTEM_COLUMNS.field(EPOCH)
        if has_state(node):
            operator = self.operator(node)
            views = {view_name(operator): pa.schema([system, *operator.output])}
            found = self._analyze_sql(operator.select([EPOCH]), views, node.name, row_wise=True)
            # UNION ALL and sinks go by position.
            assert found.names == list(node.schema.names), f"{node.name}: {found.names}"
            return found
        step = Step(begin=None, sql_nodes=(node,), end=None)
        text = step_sql(step, node.inputs, Aggregation.SORTED)
        assert text is not None, "it has an sql node"
        views = {name: pa.schema([system, *self.schema(name)]) for name in node.inputs}
        return self._analyze_sql(text, views, node.name, row_wise=True)

    def _analyze_sql(
        self, text: str, views: Mapping[str, pa.Schema], operator: str, *, row_wise: bool = False
    ) -> pa.Schema:
        def check(frame: DataFrame) -> None:
            message = unsupported_column(frame.schema) or unsupported_expression(
                frame, row_wise=row_wise
            )
            if message is not None:
                raise OperatorRefused(f"operator {operator}: {message}", operator)

        try:
            return _without_epoch(
                self._sql_runner.analyze(text, views, f"operator {operator}", check)
            )
        except OperatorFailed as error:
            if isinstance(error.__cause__, PySparkException):  # Spark's message
                raise OperatorRefused(str(error), operator) from error
            raise


def _without_epoch(schema: pa.Schema) -> pa.Schema:
    return all_nullable(pa.schema([f for f in schema if f.name != EPOCH]))


def all_nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with all fields nullable and without metadata, which would make equal plans
    differ."""
    return pa.schema([f.with_nullable(True).remove_metadata() for f in schema])
