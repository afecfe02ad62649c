"""The interface of operators with state, for those who run them. Pure.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import pyarrow as pa

from rekindle.engine.epochs import Clock
from rekindle.engine.model import DroppedRows, table_id
from rekindle.engine.state.operator import (
    BEGIN_OF_PANES,
    END_OF_PANES,
    OperatorState,
    begins_after,
)
from rekindle.engine.state.runs import RunShape
from rekindle.engine.state.spill import RunFiles
from rekindle.topology.model import Node

ONLY_TABLE = ""
"""Name of the table of an operator that has one."""
LACKS = "lacks"
"""The table of an operator whose results depend on what it lacks also later, when rows of that time
have been dropped, or whose other tables need all rows that it has. It has no rows: only its
`first_live_pane_us` is used (`lacks_us`)."""
LACKS_SHAPE = RunShape(())


class Aggregation(Enum):
    """Three methods with bit-identical results: rows of a (group, pane, epoch) are added in order.

    Hash aggregation adds rows in order until its map is full, and then merges in another order:
    such a result is not used (`rekindle.engine.spark.plans`).
    """

    HASHED = "one Spark task, hash aggregation"
    SORTED = "one Spark task, rows sorted by key and order, sort-based aggregation"
    PARTITIONED = "the same in eight hash partitions"


Evaluate = Callable[[str, Mapping[str, pa.Table]], pa.Table]
"""Runs SQL over views, which keeps the order of rows. Raises as `rekindle.engine.model.Chain`."""


class Analyze(Protocol):
    """Analyzes SQL over views."""

    def __call__(self, text: str, views: Mapping[str, pa.Schema]) -> pa.Schema:
        """The schema of the result, all columns nullable, without EPOCH. Raises OperatorRefused."""
        ...


@dataclass(frozen=True, slots=True)
class Advanced:
    """`tables`: all of the operator, by name. `rows`: ordered by EPOCH, and in each epoch by what
    is in them. `dropped`: by this call."""

    tables: Mapping[str, OperatorState]
    rows: pa.Table
    dropped: DroppedRows


class Operator(Protocol):
    """Spark runs `query` on the rows of the inputs, after the `sql` that is before the operator;
    `advance` makes new tables and rows of the result; and Spark runs `select` on these."""

    @property
    def node(self) -> Node: ...

    @property
    def tables(self) -> Mapping[str, RunShape]:
        """The columns of each table, by name; see `table_id`."""
        ...

    @property
    def output(self) -> pa.Schema:
        """The columns of `view`, all nullable."""
        ...

    @property
    def delay_us(self) -> int:
        """By how much event times of its output may be below its input's watermark."""
        ...

    @property
    def hashes_groups(self) -> bool:
        """Whether `query` groups rows, and Spark can use hash aggregation for it."""
        ...

    @property
    def asserts_absence(self) -> bool:
        """Whether some of its rows say that a row has not come. It has the table LACKS, and writes
        no such row for which it may lack one."""
        ...

    def query(self, inputs: Sequence[str], method: Aggregation) -> str | None:
        """SQL over the inputs, whose rows have SYSTEM_COLUMNS. None: `advance` gets the rows of
        each input as they are, system columns first."""
        ...

    def advance(
        self,
        tables: Mapping[str, OperatorState],
        rows: Sequence[pa.Table | None],
        clock: Clock,
        files: RunFiles | None,
        evaluate: Evaluate,
    ) -> Advanced:
        """Process the epochs of a call. `rows`: the result of `query`, or the rows of each input;
        None if there are none. Gives the same bits for one call of many epochs as for many calls.
        `files`: for rows that do not fit into memory. `evaluate`: for expressions on which the next
        tables depend. Raises DiskFull, and what `evaluate` raises."""
        ...

    def view(self, rows: pa.Table) -> pa.Table:
        """Rows of `advance`, or consecutive ones of them, as the columns of `output`."""
        ...

    def select(self, system: Sequence[str]) -> str:
        """SQL of the operator's rows, with these system columns first, over the view `view_name` of
        `view`, which has them too."""
        ...


def lacks_us(tables: Mapping[str, OperatorState]) -> int:
    """The event time through which an operator with the table LACKS may lack rows."""
    return max(tables[LACKS].first_live_pane_us - 1, BEGIN_OF_PANES)


def without_all_rows(
    operator: Operator, tables: Mapping[str, OperatorState]
) -> Mapping[str, OperatorState]:
    """The operator's tables on a branch that lacks rows of an input: of which times is not known,
    so nothing that follows on the branch says that a row has not come."""
    if not operator.asserts_absence:
        return tables
    return {**tables, LACKS: begins_after(tables[LACKS], END_OF_PANES)}


def view_name(operator: Operator) -> str:
    return f"__closed_{operator.node.name}"


def tables_of(operator: Operator) -> dict[str, str]:
    """The operator's tables: id by name."""
    return {name: table_id(operator.node.id, name) for name in operator.tables}
