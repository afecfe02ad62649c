"""Bugs that are planted in joins, sessions and `distinct`, and in their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.checkpoints import lent
from rekindle.engine import session_state
from rekindle.engine.model import State
from rekindle.engine.operators import distinct, running
from rekindle.engine.operators.distinct import DistinctOperator
from rekindle.engine.operators.join import JoinOperator, Side
from rekindle.engine.state import layout
from rekindle.engine.state.keeping import epochs_of
from rekindle.engine.state.runs import NUMBER, TIME, int64s
from rekindle_testing.simulation.planting import Mutant, replaced

_EARLY_US = 2_000_000


def _one_earlier(unmatched: Any) -> Any:
    def wrong(self: JoinOperator, *arguments: Any) -> Any:
        left, right = (replace(side, late_us=side.late_us - 1) for side in self.sides)
        return unmatched(replace(self, sides=(left, right)), *arguments)

    return wrong


def _without_bound(probes: Any) -> Any:
    def wrong(self: Side, rows: pa.Table) -> Any:
        found = probes(self, rows)
        return replace(found, low=found.low + 1, high=found.high - 1)

    return wrong


def _knows_all(without_all_rows: Any) -> Any:
    return lambda operator, tables: tables


def _without_marks(describe: Any) -> Any:
    def wrong(at: Any, watermark: int, ids: Any, state: State, *rest: Any) -> Any:
        tables = {n: t for n, t in state.operators.items() if not n.endswith("_marks")}
        return describe(at, watermark, ids, State(tables), *rest)

    return wrong


def _reads_twice(decode: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        state = decode(*arguments)
        return replace(state, deltas=(*state.deltas, *state.deltas))

    return wrong


def _own_epoch_twice(came_before: Any) -> Any:
    def wrong(self: JoinOperator, at: int, own: pa.Table, other: pa.Table) -> Any:
        epoch, of_other = (epochs_of(int64s(table.column(NUMBER))) for table in (own, other))
        return of_other <= epoch

    return wrong


def _not_held_back(delayed: Any) -> Any:
    return lambda clock, delay_us: clock


def _joins_at_the_gap(sessions: Any) -> Any:
    return lambda group, first, last, gap_us: sessions(group, first, last, gap_us + 1)


def _drops_late_rows(intervals: Any) -> Any:
    def wrong(epoch: Any, hashes: Any) -> Any:
        rows, counts = intervals(epoch, hashes)
        late = rows.column(session_state.LAST).to_numpy() <= epoch._cutoffs.before
        kept = ~(late & (counts > 0))
        if not kept.any():  # nothing is left to join
            return rows, counts
        return rows.filter(pa.array(kept)), counts[kept]

    return wrong


def _forgets_early(forget: Any) -> Any:
    def wrong(shape: Any, state: Any, slice_us: int, before_us: int) -> Any:
        return forget(shape, state, slice_us, before_us + _EARLY_US)

    return wrong


def _drops_what_is_replaced(needed: Any) -> Any:
    def wrong(self: DistinctOperator, rows: pa.Table) -> Any:
        """Only what no other row of the epoch takes the place of is kept."""
        times, numbers = int64s(rows.column(TIME)), int64s(rows.column(NUMBER))
        group, epochs = distinct._groups(rows), epochs_of(numbers)
        order = np.lexsort((numbers, times, group, epochs))
        before, after = order[:-1], order[1:]
        gone = (epochs[after] == epochs[before]) & (group[after] == group[before])
        gone &= times[after] - times[before] < self.within_us
        kept = np.ones(len(times), dtype=np.bool_)
        kept[before[gone]] = False
        return kept

    return wrong


STATE_MUTANTS: Mapping[str, Mutant] = {
    "a row without a match is written 1 us too early": replaced(
        JoinOperator, "_unmatched", _one_earlier
    ),
    "a row without a match is written while an input is missing": replaced(
        running, "without_all_rows", _knows_all
    ),
    "matches at the bounds of time are left out": replaced(Side, "probes", _without_bound),
    "rows that have matched are not in checkpoints": replaced(lent, "describe", _without_marks),
    "rows of a restored table are there twice": replaced(layout, "decode", _reads_twice),
    "two rows of one epoch match twice": replaced(JoinOperator, "_came_before", _own_epoch_twice),
    "the watermark behind an operator is not held back": replaced(
        running, "delayed", _not_held_back
    ),
    "sessions that are a gap apart are joined": replaced(
        session_state, "_sessions", _joins_at_the_gap
    ),
    "a late row does not join sessions": replaced(
        session_state._Epoch, "_intervals", _drops_late_rows
    ),
    "the table of distinct forgets too early": replaced(distinct, "forget", _forgets_early),
    "a row that is replaced in its epoch replaces none": replaced(
        DistinctOperator, "_outermost", _drops_what_is_replaced
    ),
}
"""To be found by seeds whose topology has such an operator."""
