"""What is done with an operator with state beside the SQL before and after it: by the chain on
Spark, and by what runs operators without Spark. Pure.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from rekindle.engine.epochs import EPOCH, SYSTEM_COLUMNS, Clock
from rekindle.engine.model import DroppedRows
from rekindle.engine.operators.base import Evaluate, Operator, tables_of, without_all_rows
from rekindle.engine.state.operator import EMPTY, OperatorState
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

States = Mapping[str, OperatorState]
"""The tables of all operators of a chain, by `table_id`."""


def run_operator(
    operator: Operator,
    states: States,
    rows: Sequence[pa.Table | None],
    clock: Clock,
    files: RunFiles | None,
    evaluate: Evaluate,
    *,
    complete: bool,
) -> tuple[States, pa.Table, DroppedRows]:
    """The tables of the chain after a call, the rows of the operator, and the rows that it has
    dropped. `complete`: False if rows of an input may be missing. Raises as `Operator.advance`."""
    ids = tables_of(operator)
    tables: States = {name: states.get(table, EMPTY) for name, table in ids.items()}
    if not complete:
        tables = without_all_rows(operator, tables)
    advanced = operator.advance(tables, rows, clock, files, evaluate)
    after = {ids[name]: table for name, table in advanced.tables.items()}
    return {**states, **after}, advanced.rows, advanced.dropped


def view_of(operator: Operator, rows: pa.Table, clock: Clock) -> pa.Table:
    """The view that `Operator.select` reads: system columns, and the operator's. `clock`: that of
    its output."""
    before = {epoch: watermark for epoch, watermark, _ in clock}
    numbers = rows.column(EPOCH).to_numpy()
    late = pa.array([before[e] for e in numbers.tolist()], pa.int64())
    schema = pa.schema([*SYSTEM_COLUMNS, *operator.output])
    return pa.table([pa.array(numbers), late, *operator.view(rows).columns], schema=schema)


def delayed(clock: Clock, delay_us: int) -> Clock:
    """The watermarks of an operator's output. There is none before the first row, and none after
    the last."""

    def of_output(watermark: int) -> int:
        has_bound = NO_WATERMARK < watermark < END_OF_INPUT
        return max(NO_WATERMARK + 1, watermark - delay_us) if has_bound else watermark

    if not delay_us:
        return clock
    return [(epoch, of_output(before), of_output(after)) for epoch, before, after in clock]
