"""Spark's analysis of a topology's nodes: schemas and shapes of window state. Runs no job.

The compiler infers types without Spark and may leave some unknown, so a chain analyses all nodes
with Spark, sources first; every task gets the same result.

Design: docs/design/engine.md#sql.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from rekindle.arrow_types import TIMESTAMP, arrow_schema, topology_type
from rekindle.engine.epochs import EPOCH, SYSTEM_COLUMNS
from rekindle.engine.exact_sums import combined_partials, is_wide, split_sum
from rekindle.engine.spark.query import SqlRunner
from rekindle.engine.spark.rewrite import quote
from rekindle.engine.spark.steps import (
    Aggregation,
    Step,
    WindowNode,
    step_sql,
    window_node,
)
from rekindle.engine.spark.unsupported import unsupported_column, unsupported_expression
from rekindle.engine.window_state import ROW_COUNT, WindowShape
from rekindle.errors import OperatorFailed, OperatorRefused
from rekindle.topology.model import Node, Topology
from rekindle.topology.schema import is_number
from rekindle.topology.spec import OperatorSpec, WindowSpec
from rekindle.topology.sql.aggregates import not_a_number, summed_arguments
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.windows.kind import END, START


@dataclass(frozen=True, slots=True)
class WindowAnalysis:
    """Result of the analysis of a window: the window with its partials, the shape of its state, and
    the float keys, which Spark groups by as strings."""

    node: WindowNode
    shape: WindowShape
    float_keys: frozenset[str]


class Analyzer:
    """Analyzes each node once, from its inputs' schemas. Raises OperatorRefused."""

    def __init__(self, topology: Topology, sql_runner: SqlRunner) -> None:
        self._topology = topology
        self._sql_runner = sql_runner
        self._schemas: dict[str, pa.Schema] = {}
        self._windows: dict[str, WindowAnalysis] = {}

    def schema(self, name: str) -> pa.Schema:
        """The schema of a node's rows, all columns nullable."""
        if name not in self._schemas:
            node = self._topology.nodes[name]
            if isinstance(node.spec, OperatorSpec):
                self._schemas[name] = self._output(node, node.spec)
            else:
                self._schemas[name] = arrow_schema(node.schema)
        return self._schemas[name]

    def _output(self, node: Node, operator: OperatorSpec) -> pa.Schema:
        match operator.definition:
            case str():
                return self._analyze(
                    Step(begin=None, sql_nodes=(node,), end=None), node.inputs, node.name
                )
            case WindowSpec() as window:
                return self._window_output(window_node(node, window, self._topology))
            case unknown:
                assert_never(unknown)

    def window(self, window: WindowNode) -> WindowAnalysis:
        name = window.node.name
        if name not in self._windows:
            self._windows[name] = self._analyze_window(window)
        return self._windows[name]

    def _analyze_window(self, window: WindowNode) -> WindowAnalysis:
        inputs = window.node.inputs
        input_schema = self.schema(inputs[0])
        self._check_sums(window, input_schema)
        floats = frozenset(
            k for k in window.keys if pa.types.is_floating(_type(input_schema, k, window))
        )
        window, partials_schema, wide_sums = self._partials(window, floats)
        key_types = tuple(_type(input_schema, k, window) for k in window.keys)
        partials = tuple(
            (p.name, partials_schema.field(p.name).type, p.merge)
            for p in window.decomposition.partials
        )
        for data_type in key_types + tuple(t for _, t, _ in partials):
            if pa.types.is_nested(data_type):
                name = window.node.name
                message = f"operator {name}: {data_type} can be neither a key nor an aggregate"
                raise OperatorRefused(message, name)
        assert partials_schema.get_field_index(ROW_COUNT) >= 0
        shape = WindowShape(window.assigner, key_types, partials, wide_sums)
        return WindowAnalysis(window, shape, floats)

    def _partials(
        self, window: WindowNode, floats: frozenset[str]
    ) -> tuple[WindowNode, pa.Schema, tuple[tuple[str, int], ...]]:
        """The window with sums of wide decimals divided into two; the schema of its partials; and
        name and scale of each sum that was divided."""
        inputs, name = window.node.inputs, window.node.name
        found = self._analyze(Step(begin=None, sql_nodes=(), end=window), inputs, name, floats)
        partials = window.decomposition.partials
        wide_sums = {
            p.name: found.field(p.name).type.scale
            for p in partials
            if is_wide(found.field(p.name).type, p.merge)
        }
        if not wide_sums:
            return window, found, ()
        pairs = [split_sum(p, wide_sums[p.name]) if p.name in wide_sums else (p,) for p in partials]
        separate = tuple(p for pair in pairs for p in pair)
        window = replace(window, decomposition=replace(window.decomposition, partials=separate))
        found = self._analyze(Step(begin=None, sql_nodes=(), end=window), inputs, name, floats)
        return window, found, tuple(wide_sums.items())

    def _check_sums(self, window: WindowNode, input_schema: pa.Schema) -> None:
        """Refuse sums of times, which Spark adds as seconds without an error."""
        spec = window.node.spec
        assert isinstance(spec, OperatorSpec)
        assert spec.window is not None
        summed = dict(summed_arguments(spec.window.aggregate))
        if not summed:
            return
        name, source = window.node.name, window.node.inputs[0]
        columns = ", ".join(
            f"{time_without_date_as_null(sql)} AS a{i}" for i, sql in enumerate(summed.values())
        )
        text = f"SELECT {columns} FROM {quote(source)}"
        arguments = self._analyze_sql(text, {source: input_schema}, name)
        for call, data_type in zip(summed, arguments.types, strict=True):
            if not is_number(topology_type(data_type)):
                problem = not_a_number(call, str(data_type))
                raise OperatorRefused(f"operator {name}: {problem.message}; {problem.hint}", name)

    def _window_output(self, window: WindowNode) -> pa.Schema:
        shape = self.window(window).shape
        bounds = [(n, TIMESTAMP) for n in (START, END)]
        keys = zip(shape.key_names, shape.keys, strict=True)
        partials = combined_partials(shape)
        step = Step(begin=window, sql_nodes=(), end=None)
        closed = pa.schema([*system_fields(step), *bounds, *keys, *partials])
        text = step_sql(step, [], Aggregation.SORTED, frozenset())
        return self._analyze_sql(text, {window.closed_view: closed}, window.node.name)

    def _analyze(
        self,
        step: Step,
        inputs: tuple[str, ...],
        operator: str,
        float_keys: frozenset[str] = frozenset(),
    ) -> pa.Schema:
        views = {i: pa.schema([*system_fields(step), *self.schema(i)]) for i in inputs}
        text = step_sql(step, inputs, Aggregation.SORTED, float_keys)
        return self._analyze_sql(text, views, operator, row_wise=step.end is None)

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


def system_fields(step: Step) -> list[pa.Field]:
    return [SYSTEM_COLUMNS.field(name) for name in step.system_columns]


def _type(schema: pa.Schema, name: str, window: WindowNode) -> pa.DataType:
    at = next((i for i, n in enumerate(schema.names) if n.lower() == name.lower()), None)
    if at is None:
        message = f"operator {window.node.name}: groupBy column {name} does not exist"
        raise OperatorRefused(message, window.node.name)
    return schema.field(at).type


def _without_epoch(schema: pa.Schema) -> pa.Schema:
    return all_nullable(pa.schema([f for f in schema if f.name != EPOCH]))


def all_nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with all fields nullable and without metadata, which would make equal plans
    differ."""
    return pa.schema([f.with_nullable(True).remove_metadata() for f in schema])
