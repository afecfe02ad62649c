"""`make simulate SEEDS=500`: simulations with random faults; exit 0 means that no invariant was
violated and all was done once nothing failed. Prints which cells of the product's transition tables
were not reached."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from rekindle_testing.simulation.coverage import Cell, coverage_lines
from rekindle_testing.simulation.run import Outcome, shrink, simulate

_SHOWN = 3
"""Failures that are shrunk and shown."""
_PROGRESS_EVERY = 100


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    outcomes = []
    failed = []
    for outcome in run_seeds(range(options.first, options.first + options.seeds), options.jobs):
        outcomes.append(outcome)
        if outcome.failure is not None:
            failed.append(outcome)
            _print(f"seed {outcome.seed}: {outcome.failure}")
        if len(outcomes) % _PROGRESS_EVERY == 0:
            _print(f"{len(outcomes)} of {options.seeds} seeds, {len(failed)} failed")
    for outcome in failed[:_SHOWN]:
        for line in describe_failure(outcome):
            _print(line)
    cells = sum((Counter(outcome.cells) for outcome in outcomes), Counter[Cell]())
    for line in [*coverage_lines(cells), *summary(outcomes)]:
        _print(line)
    return 1 if failed else 0


def run_seeds(seeds: Sequence[int], jobs: int | None) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(simulate, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(simulate, seeds, chunksize=4)


def describe_failure(outcome: Outcome) -> list[str]:
    """A failure, shrunk to as few faults as still lead to it."""
    shrunk = shrink(outcome)
    return [
        "",
        f"seed {outcome.seed}, {len(shrunk.faults)} of {len(outcome.faults)} faults are needed:",
        *(f"  {line}" for line in shrunk.lines),
        f"  {shrunk.failure}",
        f"replay: make simulate FIRST={outcome.seed} SEEDS=1",
        "",
    ]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Totals of all seeds. "All was done" is when `Simulation.not_done` is empty."""
    failed = [outcome.seed for outcome in outcomes if outcome.failure is not None]
    seconds = [outcome.seconds for outcome in outcomes]
    return [
        f"{len(outcomes)} seeds, {sum(len(o.faults) for o in outcomes)} faults, "
        f"{sum(o.appended for o in outcomes)} epochs computed, "
        f"{sum(o.written for o in outcomes)} written, "
        f"{sum(o.moved for o in outcomes)} states moved, "
        f"{sum(o.tentative for o in outcomes)} tentative epochs; failed seeds: {failed or 'none'}",
        f"simulated seconds from the last fault until all was done: p50 {median(seconds):.1f}, "
        f"max {max(seconds):.1f}",
    ]


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
