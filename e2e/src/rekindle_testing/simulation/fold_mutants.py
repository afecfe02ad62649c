"""Bugs that are planted in the order in which rows are folded, and in windows, which simulations do
not run.

The unit tests that `docs/design/determinism.md` names have to find them. Each runs in a process
of its own, in which nothing has imported what it changes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rekindle.engine import row_window_state, session_state, window_assigners, window_state
from rekindle.engine.spark import steps
from rekindle.engine.state import runs
from rekindle_testing.paths import ROOT
from rekindle_testing.simulation.planting import Mutant, replaced


def _reverses_groups(groups: Any) -> Any:
    def wrong(rows: Any) -> Any:
        order, first = groups(rows)
        group = np.cumsum(first)
        return order[np.lexsort((-np.arange(len(order)), group))], first

    return wrong


def _reverses_tables(concatenate: Any) -> Any:
    return lambda shape, tables: concatenate(shape, tables[::-1])


def _forgets_position(step_sql: Any) -> Any:
    return lambda *arguments: step_sql(*arguments).replace(f", {window_state.ROW_ORDER})", ")")


def _drops_late_rows(intervals: Any) -> Any:
    return _without(intervals, lambda late, new: late & new)


def _ignores_rows_of_the_epoch(intervals: Any) -> Any:
    return _without(intervals, lambda late, new: ~late & new)


def _without(intervals: Any, dropped: Any) -> Any:
    """Without some of the intervals that an epoch joins."""

    def wrong(epoch: Any, hashes: Any) -> Any:
        rows, counts = intervals(epoch, hashes)
        late = rows.column(session_state.LAST).to_numpy() <= epoch._cutoffs.before
        kept = ~dropped(late, counts > 0)
        return rows.filter(pa.array(kept)), counts[kept]

    return wrong


def _begins_with_rows(closing: Any) -> Any:
    def wrong(panes: Any, pane_us: int, count: int, before: int, after: int) -> Any:
        return closing(panes, pane_us, count, max(before, int(panes[0]) + pane_us), after)

    return wrong


def _counts_from_the_call(numbers: Any) -> Any:
    def wrong(portion: Any, kept: Any, group: Any) -> Any:
        number, count = numbers(portion, kept.slice(0, 0), group[kept.num_rows :])
        of_kept, count_kept = (kept.column(name).to_numpy() for name in ("__p", "__c"))
        return np.concatenate([of_kept, number]), np.concatenate([count_kept, count])

    return wrong


_TESTS = "pipelines/tests"
_TESTS_S = 300.0  # they take a few seconds
FOLD_MUTANTS: Mapping[str, tuple[Mutant, str]] = {
    "rows of a group are folded from the last to the first": (
        replaced(runs, "_groups", _reverses_groups),
        f"{_TESTS}/test_engine_state.py",
    ),
    "a later part of the state is folded before an earlier one": (
        replaced(runs, "concatenate", _reverses_tables),
        f"{_TESTS}/test_engine_state.py",
    ),
    "Spark sorts rows of a group without their position": (
        replaced(steps, "step_sql", _forgets_position),
        f"{_TESTS}/test_engine_steps.py",
    ),
    "late rows are dropped before sessions are joined": (
        replaced(session_state._Epoch, "_intervals", _drops_late_rows),
        f"{_TESTS}/test_engine_session_state.py",
    ),
    "a session closes although a row of the epoch extends it": (
        replaced(session_state._Epoch, "_intervals", _ignores_rows_of_the_epoch),
        f"{_TESTS}/test_engine_session_state.py",
    ),
    "of windows with a step the first one with rows is left out": (
        replaced(window_assigners, "closing_cumulative_windows", _begins_with_rows),
        f"{_TESTS}/test_engine_cumulative_windows.py",
    ),
    "rows of a window of rows are counted anew in each call": (
        replaced(row_window_state._Portion, "_numbers", _counts_from_the_call),
        f"{_TESTS}/test_engine_row_window_state.py",
    ),
}
"""Name -> (mutant, the file of the tests that have to find it)."""


def found_by_tests(name: str) -> str | None:
    """The test that finds a mutant; None if all pass. A mutant that cannot be run is a
    `ValueError`."""
    command = [sys.executable, "-m", __name__, name]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_TESTS_S
    )
    if result.returncode == pytest.ExitCode.OK:
        return None
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    if result.returncode != pytest.ExitCode.TESTS_FAILED or not failed:
        raise ValueError(result.stdout[-1000:] + result.stderr[-1000:])
    return failed[0].removeprefix("FAILED ")


def main(name: str) -> int:
    mutant, tests = FOLD_MUTANTS[name]
    with mutant():
        return pytest.main(
            [tests, "-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
