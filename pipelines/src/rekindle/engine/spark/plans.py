"""What Spark's physical plans are made of, and what they counted. Through Py4J."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from py4j.java_gateway import JavaObject

AGGREGATE = "HashAggregateExec"
ROW_BY_ROW = frozenset(
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
"""Classes of physical operators that keep nothing, and hand rows on in order."""
IN_ORDER = ROW_BY_ROW | {AGGREGATE}


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


class HashAggregation:
    """Tells rows of a plan that were folded in order from those that may not have been.

    Hash aggregation folds in the order of its input until its map is full. From then on it merges
    what it has with what follows, in an order of its own: a sum of doubles may differ in its last
    bits. What a map will hold cannot be known before: `explode` makes rows, an expression makes
    keys of any length. But Spark counts it, and a plan that aggregates in another way, as for keys
    that cannot be hashed, is not trusted at all.
    """

    def __init__(self, plan: JavaObject) -> None:
        found = list(operators(plan))
        names = {class_name(operator) for operator in found}
        self._alone = AGGREGATE in names and names <= IN_ORDER
        self._metrics = [
            operator.metrics().apply("numTasksFallBacked")
            for operator in found
            if class_name(operator) == AGGREGATE
        ]

    def rows(self, run: Callable[[], pa.Table]) -> pa.Table | None:
        """What `run`, a run of the plan, gives if it is in order."""
        if not self._alone:
            return None
        before = self._fallbacks()
        rows = run()
        return rows if self._fallbacks() == before else None

    def _fallbacks(self) -> int:
        return sum(int(metric.value()) for metric in self._metrics)
