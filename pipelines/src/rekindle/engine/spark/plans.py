"""Inspects Spark's physical plans and their metrics, through Py4J."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from py4j.java_gateway import JavaObject

AGGREGATE = "HashAggregateExec"
ROW_WISE_CLASSES = frozenset(
    {
        "CoalesceExec",
        "ExpandExec",
        "FilterExec",
        "GenerateExec",
        "InputAdapter",
        "LocalTableScanExec",
        "ProjectExec",
        "RDDScanExec",
        "UnionExec",
        "WholeStageCodegenExec",
    }
)
"""Classes of stateless physical operators that keep the order of rows."""
ORDER_PRESERVING_CLASSES = ROW_WISE_CLASSES | {AGGREGATE}


def each(collection: JavaObject) -> Iterator[JavaObject]:
    """The elements of a Scala collection."""
    iterator = collection.iterator()
    while iterator.hasNext():
        yield iterator.next()


def operators(plan: JavaObject) -> Iterator[JavaObject]:
    """A physical plan's operators, from its result to its scans."""
    yield plan
    for child in each(plan.children()):
        yield from operators(child)


def class_name(operator: JavaObject) -> str:
    return str(operator.getClass().getSimpleName())


class AggregationOrder:
    """Detects whether a plan aggregated its rows in order.

    Hash aggregation processes its input in order until its map is full. Then it falls back to
    sorting and merging, in another order: a sum of doubles may differ in its last bits. The size of
    the map is not known in advance: `explode` adds rows, and expressions may give keys of any
    length. But Spark counts fallbacks. A plan that aggregates in another way, as for keys that
    cannot be hashed, is never accepted.
    """

    def __init__(self, plan: JavaObject) -> None:
        found = list(operators(plan))
        names = {class_name(operator) for operator in found}
        self._keeps_order = AGGREGATE in names and names <= ORDER_PRESERVING_CLASSES
        self._metrics = [
            operator.metrics().apply("numTasksFallBacked")
            for operator in found
            if class_name(operator) == AGGREGATE
        ]

    def result_if_in_order(self, run: Callable[[], pa.Table]) -> pa.Table | None:
        """The result of `run`, which runs the plan; None if rows may have been aggregated out of
        order."""
        if not self._keeps_order:
            return None
        before = self._fallbacks()
        rows = run()
        return rows if self._fallbacks() == before else None

    def _fallbacks(self) -> int:
        return sum(int(metric.value()) for metric in self._metrics)
