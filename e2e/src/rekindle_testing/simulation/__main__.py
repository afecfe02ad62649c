"""`make simulate SEEDS=500`: simulations with random faults, and with fixed ones; exit 0 means that
no invariant was violated, all was done once nothing failed, and each fixed schedule has led to its
transition. Prints which cells of the product's transition tables were not reached."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

from rekindle_testing.simulation.coverage import Cell, coverage_lines, unreached
from rekindle_testing.simulation.pool import process_pool
from rekindle_testing.simulation.run import SimulationOutcome, shrink, simulate
from rekindle_testing.simulation.schedules import SCHEDULES, run_schedule

_SHOWN = 3
"""Failures that are shrunk and shown."""
_PROGRESS_EVERY, _CELLS_EVERY = 100, 500

_Of = TypeVar("_Of")
_Result = TypeVar("_Result")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, help="the first seed; without fixed schedules then")
    parser.add_argument("--schedule", choices=SCHEDULES, help="only this fixed schedule")
    parser.add_argument("--jobs", type=int, help="processes; one for each CPU if it is not given")
    options = parser.parse_args(arguments)
    seeds = range(options.seeds)
    schedules = list(SCHEDULES)
    if options.first is not None:
        seeds, schedules = range(options.first, options.first + options.seeds), []
    if options.schedule is not None:
        seeds, schedules = range(0), [options.schedule]
    outcomes, not_reached = _run_schedules(schedules, options.jobs)
    for outcome in _run_seeds(seeds, options.jobs):
        outcomes.append(outcome)
        if len(outcomes) % _CELLS_EVERY == 0:
            _print(f"not reached yet: {'; '.join(map(', '.join, unreached(_cells(outcomes))))}")
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    for outcome in failed[:_SHOWN]:
        for line in describe_failure(outcome):
            _print(line)
    for line in [*coverage_lines(_cells(outcomes)), *summary(outcomes)]:
        _print(line)
    return 1 if failed or not_reached else 0


def _cells(outcomes: Iterable[SimulationOutcome]) -> Counter[Cell]:
    return sum((Counter(outcome.cells) for outcome in outcomes), Counter[Cell]())


def _run_seeds(seeds: Sequence[int], jobs: int | None) -> Iterator[SimulationOutcome]:
    failed = 0
    for count, outcome in enumerate(_in_parallel(simulate, seeds, jobs, chunk=4), 1):
        if outcome.failure is not None:
            failed += 1
            _print(f"seed {outcome.seed}: {outcome.failure}")
        if count % _PROGRESS_EVERY == 0:
            _print(f"{count} of {len(seeds)} seeds, {failed} failed")
        yield outcome


def _run_schedules(
    names: Sequence[str], jobs: int | None
) -> tuple[list[SimulationOutcome], list[str]]:
    """The outcomes, and the names of the schedules that have not led to their transition."""
    outcomes, not_reached = [], []
    for name, found in zip(names, _in_parallel(run_schedule, names, jobs), strict=True):
        outcomes += found
        last, cell = found[-1], ", ".join(SCHEDULES[name].cell)
        if last.failure is not None:
            result = f"seed {last.seed}: {last.failure}"
        elif last.cells.get(SCHEDULES[name].cell):
            result = f"has led to {cell}, with seed {last.seed}"
        else:
            not_reached.append(name)
            result = f"{len(found)} seeds have not led to {cell}"
        _print(f"{name}: {result}")
    return outcomes, not_reached


def _in_parallel(
    function: Callable[[_Of], _Result], items: Sequence[_Of], jobs: int | None, chunk: int = 1
) -> Iterator[_Result]:
    if jobs == 1:
        yield from map(function, items)
        return
    with process_pool(jobs) as pool:
        yield from pool.map(function, items, chunksize=chunk)


def describe_failure(outcome: SimulationOutcome) -> list[str]:
    """A failure, shrunk to as few faults as still lead to it."""
    shrunk = shrink(outcome)
    name = _schedule_of(outcome)
    chosen = f"FIRST={outcome.seed} SEEDS=1" if name is None else f'SCHEDULE="{name}"'
    return [
        "",
        f"seed {outcome.seed}, {len(shrunk.faults)} of {len(outcome.faults)} faults are needed:",
        *(f"  {line}" for line in shrunk.lines),
        f"  {shrunk.failure}",
        f"replay: make simulate {chosen}",
        "",
    ]


def _schedule_of(outcome: SimulationOutcome) -> str | None:
    """The name of the fixed schedule; None if its faults are random."""
    of = (n for n, schedule in SCHEDULES.items() if schedule.faults == outcome.faults)
    return next(of, None)


def summary(outcomes: Sequence[SimulationOutcome]) -> list[str]:
    """Totals of all simulations. "All was done" is when `Simulation.not_done` is empty."""
    failed = [outcome.seed for outcome in outcomes if outcome.failure is not None]
    seconds = [outcome.seconds for outcome in outcomes]
    return [
        f"{len(outcomes)} simulations, {sum(len(o.faults) for o in outcomes)} faults, "
        f"{sum(o.appended for o in outcomes)} epochs computed, "
        f"{sum(o.written for o in outcomes)} written, "
        f"{sum(o.moved for o in outcomes)} states lent, "
        f"{sum(o.tentative for o in outcomes)} tentative epochs; failed seeds: {failed or 'none'}",
        f"simulated seconds from the last fault until all was done: p50 {median(seconds):.1f}, "
        f"max {max(seconds):.1f}",
    ]


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
