"""Bugs that are planted in the order in which rows are folded, which simulations do not run.

The unit tests that `docs/design/determinism.md` names have to find them. Each runs in a process
of its own, in which nothing has imported what it changes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rekindle.engine.operators import window
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
    return lambda *arguments: step_sql(*arguments).replace(f", {window.ORDER})", ")")


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
