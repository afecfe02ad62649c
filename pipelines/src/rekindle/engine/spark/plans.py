"""What Spark's physical plans are made of, and what they counted. Through Py4J."""

from __future__ import annotations

from collections.abc import Iterator

from py4j.java_gateway import JavaObject


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


class Fallbacks:
    """Notices when a plan's hash aggregation fell back to sorting, because its map was full.

    From then on it merges what it had with what follows, in an order of its own: a sum of doubles
    may differ in its last bits. What a map will hold cannot be known before: `explode` makes rows,
    an expression makes keys of any length.
    """

    def __init__(self, plan: JavaObject) -> None:
        self._metrics = [
            operator.metrics().apply("numTasksFallBacked")
            for operator in operators(plan)
            if class_name(operator) == "HashAggregateExec"
        ]
        self._seen = 0

    def any_new(self) -> bool:
        """Whether there were any since this was last asked."""
        before, self._seen = self._seen, sum(metric.value() for metric in self._metrics)
        return self._seen > before
