"""States of fake chains and of tests of the store: one table of any columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rekindle.engine.model import State
from rekindle.engine.state.operator import BEGIN_OF_PANES, OperatorState, Page
from rekindle.engine.state.runs import Run


def of_runs(*runs: Run) -> OperatorState:
    pages = tuple(Page(BEGIN_OF_PANES + at, 0, run) for at, run in enumerate(runs))
    zeros = np.zeros(len(runs), dtype=np.int64)
    return OperatorState(pages=pages, folded_through=zeros, pending=zeros, pending_at_restore=zeros)


def one_run(table: pa.Table) -> OperatorState:
    return of_runs(Run(table))


def tables_of(state: State, operator: str = "op") -> list[pa.Table]:
    return [run.table for run in state.operators[operator].runs()]


def count_state(operator: str, count: int) -> State:
    """The state of a chain that only counts."""
    return State({operator: one_run(pa.table({"n": [count]}))})


def value_in_state(state: State, operator: str) -> int:
    if operator not in state.operators:
        return 0
    (run,) = state.operators[operator].runs()
    return int(run.table.column("n")[0].as_py())
