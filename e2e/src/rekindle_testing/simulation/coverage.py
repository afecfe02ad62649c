"""Which cells of the transition tables simulations have reached: how often each event happened in
each state.

Design: docs/simulation.md#coverage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any
from unittest.mock import patch

from rekindle.consistency import states
from rekindle.coordinator.agreement import disputes
from rekindle.coordinator.agreement.disputes import DisputeEvent, DisputePhase
from rekindle.coordinator.checkpoints import phases as commits
from rekindle.coordinator.checkpoints.phases import CommitEvent
from rekindle.protocol import TaskPhase
from rekindle.task.core import phases as tasks
from rekindle.task.core import start
from rekindle.task.core.phases import TaskEvent
from rekindle.transitions import StateMachine
from rekindle_operator.reconcile import phases, slots

Cell = tuple[str, str, str]
"""A table, a state and an event."""

TABLES: Mapping[str, Mapping[Any, Mapping[Any, Any]]] = {
    "consistency": states.TRANSITIONS,
    "task": tasks.TRANSITIONS,
    "start": start.NEXT,
    "checkpoint": commits.TRANSITIONS,
    "dispute": disputes.TRANSITIONS,
    "slot": phases.SLOT_TRANSITIONS,
}

CELLS: Sequence[Cell] = [
    (name, state, event)
    for name, table in TABLES.items()
    for state in table
    for event in table[state]
]


def _all_of(table: str, *events: StrEnum) -> list[Cell]:
    """The cells of these events; of all events if none is named."""
    return [cell for cell in CELLS if cell[0] == table and (not events or cell[2] in events)]


_REASONS: Sequence[tuple[str, Sequence[Cell]]] = [
    (
        "one replica of a partition computes wrong results here, and the others agree",
        [
            ("dispute", DisputePhase.OPEN, DisputeEvent.MATCHED_NONE),
            *(cell for cell in _all_of("dispute") if cell[1] == DisputePhase.UNRESOLVED),
        ],
    ),
    (
        "the store is never exchanged for another one",
        _all_of("checkpoint", CommitEvent.MANIFEST_MISSING),
    ),
    (
        "the store loses no object, and nobody deletes one of an entry that may be committed",
        _all_of("checkpoint", CommitEvent.ENTRIES_REFUSED),
    ),
    (
        "nothing fails here before a task restores: operators compile, and Spark starts",
        [("task", TaskPhase.WAITING, TaskEvent.FAILED)],
    ),
    (
        "nothing that inputs need is missing here",
        [("start", start.StartStep.INPUTS, "step_failed")],
    ),
    (
        "tasks have no other thread here that could report something once a task has failed",
        [
            ("task", TaskPhase.FAILED, event)
            for event in (TaskEvent.CAUGHT_UP, TaskEvent.FELL_BEHIND, TaskEvent.FAILED)
        ],
    ),
]
UNREACHABLE: Mapping[Cell, str] = {cell: reason for reason, cells in _REASONS for cell in cells}
"""Why simulations cannot reach a cell."""


@contextmanager
def counted() -> Iterator[Counter[Cell]]:
    """Count the transitions of all that runs within it."""
    counts: Counter[Cell] = Counter()
    names = {id(table): name for name, table in TABLES.items()}

    def counting_machine(step: Callable[..., Any]) -> Callable[..., Any]:
        def counting(self: StateMachine[Any, Any], event: Any) -> None:
            counts[names[id(self._table)], self.state, event] += 1
            step(self, event)

        return counting

    def counting_disputes(next_state: Callable[..., Any]) -> Callable[..., Any]:
        def counting(subject: str, table: Any, state: Any, event: Any, *more: Any) -> Any:
            counts["dispute", state, event] += 1
            return next_state(subject, table, state, event, *more)

        return counting

    def counting_slots(next_phase: Callable[..., Any]) -> Callable[..., Any]:
        def counting(phase: Any, event: Any, details: str) -> Any:
            counts["slot", phase, event] += 1
            return next_phase(phase, event, details)

        return counting

    with ExitStack() as stack:
        for owner, name, counting in (
            (StateMachine, "step", counting_machine),
            (disputes, "next_state", counting_disputes),
            (slots, "next_slot_phase", counting_slots),
        ):
            original = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, counting(original)))
        yield counts


def unreached(counts: Mapping[Cell, int]) -> list[Cell]:
    """The cells that were not reached, though simulations can reach them."""
    return [cell for cell in CELLS if not counts.get(cell) and cell not in UNREACHABLE]


def coverage_lines(counts: Mapping[Cell, int]) -> list[str]:
    """A table of what was reached, and the cells that never were."""
    lines = ["transitions reached:"]
    for name, table in TABLES.items():
        cells = [cell for cell in CELLS if cell[0] == name]
        reached = [cell for cell in cells if counts.get(cell)]
        lines.append(f"  {name}: {len(reached)} of {len(cells)} cells")
        for state in table:
            row = [(e, counts.get((name, state, e), 0)) for e in table[state]]
            if row:
                lines.append(f"    {state}: " + ", ".join(f"{e} {n}" for e, n in row))
    for cell in CELLS:
        reason = UNREACHABLE.get(cell)
        if not counts.get(cell):
            lines.append(f"never reached: {': '.join(cell)} ({reason or 'not by these seeds'})")
        elif reason is not None:
            lines.append(f"reached, though listed as unreachable: {': '.join(cell)}")
    return lines
