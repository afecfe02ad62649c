"""Operators with state in simulations: what a run without faults computes, with and without bugs,
and what restores and tentative epochs may not change. (Whole topologies: `make simulate`.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from rekindle.engine.model import State
from rekindle.streams.epochs import EpochInput
from rekindle.topology.model import Partition
from rekindle_testing.simulation.chains import digests_of
from rekindle_testing.simulation.coordinator_api import TOPOLOGY, compiled
from rekindle_testing.simulation.expected import Expected
from rekindle_testing.simulation.run import has_state
from rekindle_testing.simulation.state_mutants import STATE_MUTANTS
from rekindle_testing.simulation.topologies import (
    PAYMENTS,
    QUESTIONS,
    VISITS,
    Spec,
)
from rekindle_testing.simulation.values import FoldedState, TaskComputation, rows_of

pytestmark = pytest.mark.simulated

EPOCHS = 40
SPECS = {"PAYMENTS": PAYMENTS, "QUESTIONS": QUESTIONS, "VISITS": VISITS}


class Run:
    """The epochs of a topology without faults, and what one of its partitions reads."""

    def __init__(self, spec: Spec) -> None:
        self.topology = compiled(TOPOLOGY, spec)
        self.computation = TaskComputation(self.topology)
        self.expected = Expected(self.computation)
        for segment in self.topology.segments:
            for index in range(segment.partitions):
                self.expected.output(Partition(segment.id, index), EPOCHS)

    def partition(self, operator: str) -> Partition:
        found = (s.id for s in self.topology.segments if s.nodes == (operator,))
        return Partition(next(found), 0)


@cache
def run_of(name: str) -> Run:
    return Run(SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_operators_write_what_plain_python_gives(name: str) -> None:
    assert run_of(name).expected.wrong_rows() == ""


def restore_often(run: Run, operator: str) -> bool:
    """Whether calls of up to three epochs, each from a checkpoint, give the same as one run."""
    partition, state = run.partition(operator), FoldedState()
    inputs = run.expected.inputs(partition)
    for first in range(0, EPOCHS, 3):
        epochs = inputs[first : first + 3]
        outputs, tables = run.computation.process(partition, state, epochs)
        fold = state.fold
        for epoch, output in zip(epochs, outputs, strict=True):
            fold = run.computation.value(partition, fold, epoch, output)
        state = FoldedState(tables.operators, fold)
        last = epochs[-1]
        if not run.expected.has_state(partition, last.epoch, last.watermark, state):
            return False
        state = run.computation.restored(state, last.epoch)
        if digests_of(state) != digests_of(tables):
            return False
    return True


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("PAYMENTS", "settled"),
        ("PAYMENTS", "newest"),
        ("QUESTIONS", "once"),
        ("QUESTIONS", "open"),
        ("VISITS", "matched"),
        ("VISITS", "visits"),
    ],
)
def test_calls_of_any_size_from_checkpoints_give_the_same(name: str, operator: str) -> None:
    assert restore_often(run_of(name), operator)


def contradictions(run: Run, operator: str) -> list[str]:
    """Of a tentative branch that lacks the second input of a join for ten epochs."""
    partition, state, found = run.partition(operator), State(), list[str]()
    inputs = run.expected.inputs(partition)
    _, state = run.computation.process(partition, state, inputs[:10])
    for epoch in inputs[10:20]:
        lacks = EpochInput(
            epoch.epoch,
            epoch.watermark_before,
            epoch.watermark,
            (epoch.inputs[0], rows_of()),
            complete=False,
        )
        (output,), state = run.computation.process(partition, state, [lacks])
        found.append(run.expected.contradicted(partition, epoch.epoch, output.rows))
    return list(filter(None, found))


@pytest.mark.parametrize(("name", "operator"), [("PAYMENTS", "settled"), ("QUESTIONS", "open")])
def test_a_tentative_row_is_not_contradicted(name: str, operator: str) -> None:
    assert contradictions(run_of(name), operator) == []


def is_wrong(name: str) -> bool:
    return bool(Run(SPECS[name]).expected.wrong_rows())


FOUND: Mapping[str, Callable[[], bool]] = {
    "a row without a match is written 1 us too early": lambda: is_wrong("QUESTIONS"),
    "a row without a match is written while an input is missing": (
        lambda: bool(contradictions(run_of("PAYMENTS"), "settled"))
    ),
    "matches at the bounds of time are left out": lambda: is_wrong("PAYMENTS"),
    "rows that have matched are not in checkpoints": (
        lambda: not restore_often(run_of("PAYMENTS"), "settled")
    ),
    "rows of a restored table are there twice": (
        lambda: not restore_often(run_of("PAYMENTS"), "settled")
    ),
    "two rows of one epoch match twice": lambda: is_wrong("VISITS"),
    "the watermark behind an operator is not held back": lambda: is_wrong("VISITS"),
    "sessions that are a gap apart are joined": lambda: is_wrong("VISITS"),
    "a late row does not join sessions": lambda: is_wrong("VISITS"),
    "the table of distinct forgets too early": lambda: is_wrong("QUESTIONS"),
    "a row that is replaced in its epoch replaces none": lambda: is_wrong("PAYMENTS"),
}
"""By mutant, what finds it."""


@pytest.mark.parametrize("name", STATE_MUTANTS)
def test_planted_bugs_in_operators_are_found(name: str) -> None:
    for run in SPECS:
        run_of(run)  # as they are without the bug
    with STATE_MUTANTS[name]():
        assert FOUND[name]()


def test_a_part_of_the_seeds_has_operators_with_state() -> None:
    assert {has_state(seed) for seed in range(20)} == {False, True}
