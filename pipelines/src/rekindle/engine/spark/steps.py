"""Divides a segment's chain into steps and generates the SQL of each. Pure, no pyspark.

A step is one Spark query. It begins at the segment's inputs or at the rows of an operator with
state, goes through `sql` nodes, and ends in the segment's output or in the query of the next
operator with state. Its text is constant: all that differs between epochs is in the rows
(`rekindle.engine.spark.rewrite`).

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.engine.epochs import EPOCH, LATE_BEFORE
from rekindle.engine.operators.base import Aggregation, Operator
from rekindle.engine.operators.registry import has_state
from rekindle.engine.spark.rewrite import with_system_columns
from rekindle.topology.model import Node, Segment, Topology
from rekindle.topology.spec import OperatorSpec
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.sql.tokens import quote

_SELECT = re.compile(r"\bselect\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Step:
    """`begin` is None for the segment's inputs; `end` is None for its output.

    `has_epoch_column`: whether rows have a column with their epoch. If a call has only one epoch,
    the last step leaves it out: this saves a tenth of the time of an epoch of 100,000 rows.
    """

    begin: Operator | None
    sql_nodes: tuple[Node, ...]
    end: Operator | None
    has_epoch_column: bool = True

    @property
    def system_columns(self) -> tuple[str, ...]:
        """The system columns of the step's input views; the watermark only if it ends in an
        operator with state."""
        if not self.has_epoch_column:
            return ()
        return (EPOCH,) if self.end is None else (EPOCH, LATE_BEFORE)

    @property
    def operators(self) -> str:
        """The names of the operators whose expressions this step's query evaluates, for
        messages."""
        names = [n.node.name for n in (self.begin,) if n] + [n.name for n in self.sql_nodes]
        return ", ".join(names + [n.node.name for n in (self.end,) if n])


def operators_of(segment: Segment, topology: Topology) -> tuple[Node, ...]:
    """The operators of a segment: all nodes except the source."""
    return tuple(topology.nodes[n] for n in segment.nodes[1 if segment.is_source else 0 :])


def plan_steps(
    segment: Segment, topology: Topology, operator_of: Callable[[Node], Operator]
) -> tuple[Step, ...]:
    """`operator_of`: the operator of a node that has state."""
    steps: list[Step] = []
    begin: Operator | None = None
    sql_nodes: list[Node] = []
    for node in operators_of(segment, topology):
        if not has_state(node):
            sql_nodes.append(node)
            continue
        end = operator_of(node)
        steps.append(Step(begin, tuple(sql_nodes), end))
        begin, sql_nodes = end, []
    return (*steps, Step(begin, tuple(sql_nodes), None))


def step_sql(step: Step, sources: Sequence[str], method: Aggregation) -> str | None:
    """One query for a step; None if its result is the rows of its inputs, as they are. `sources`
    are the views of the segment's inputs.

    It has as few query blocks as possible: a task can only start after Spark has planned them.
    """
    blocks: list[tuple[str, str]] = []
    if step.begin is not None:
        blocks.append((step.begin.node.name, step.begin.select(step.system_columns)))
    for node in step.sql_nodes:
        sql = time_without_date_as_null(_sql(node))
        blocks.append((node.name, with_system_columns(sql, step.system_columns)))
    if step.end is not None:
        query = step.end.query([blocks[-1][0]] if blocks else sources, method)
        blocks += [("", query)] if query is not None else []
    if not blocks:
        return None
    *before, (_, last) = blocks
    if not before:
        return last
    return f"WITH {', '.join(f'{quote(name)} AS ({text})' for name, text in before)} {last}"


def _sql(node: Node) -> str:
    assert isinstance(node.spec, OperatorSpec)
    return node.spec.sql or ""


def is_divisible(step: Step, sources: Sequence[str]) -> bool:
    """Whether a step may be run on consecutive parts of its rows. An operator's query may aggregate
    all rows of an epoch together; a UNION ALL outputs all rows of one branch before those of the
    next."""
    if step.end is not None or (step.begin is None and len(sources) > 1):
        return False
    return all(len(_SELECT.findall(_sql(node))) == 1 for node in step.sql_nodes)
