"""Fixed schedules of faults, for transitions that random faults hardly ever lead to: what has to
happen for each of them fits into a few milliseconds, or needs several things in the right order.

`make simulate` runs them beside its seeds.

Design: docs/simulation.md#coverage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle.coordinator.agreement.disputes import DisputeEvent, DisputePhase
from rekindle.protocol import ConsistencyState
from rekindle_operator.reconcile.phases import SlotEvent, SlotPhase
from rekindle_testing.simulation.coverage import Cell
from rekindle_testing.simulation.faults import FaultKind, SimulatedFault
from rekindle_testing.simulation.run import SimulationOutcome, simulate
from rekindle_testing.simulation.topologies import CHAIN, DIAMOND, Variant
from rekindle_testing.simulation.wrong_results import Recurrence

_MAX_SEEDS = 40


@dataclass(frozen=True, slots=True)
class Schedule:
    """Is run with one seed after another, from `first_seed` on, until the transition `cell` has
    happened."""

    cell: Cell
    faults: Sequence[SimulatedFault]
    variant: Variant
    first_seed: int = 0


def _fault(
    kind: FaultKind, at: float, seconds: float, target: int = 0, other: int = 0
) -> SimulatedFault:
    return SimulatedFault(at, kind, target, other, seconds)


_REPEATED = list(Recurrence).index(Recurrence.REPEATED)  # `other` of a wrong result
_AWAY = _fault(FaultKind.STOP_TASK, 20.0, 14.0, target=0)
"""In CHAIN, one of the two partitions of the source is away."""
_READERS = (2, 3)
"""The two replicas that read it."""
_TENTATIVE = Variant(CHAIN, max_delay_s=2.0)

SCHEDULES: Mapping[str, Schedule] = {
    "a refusal that comes too late": Schedule(
        ("consistency", ConsistencyState.STABLE, "partner_refused"),
        [  # Without answers both replicas begin to correct; when the coordinator goes on, one is
            # done, and the slow one refuses what it was asked for long ago.
            _AWAY,
            _fault(FaultKind.SLOW_TASK, 33.0, 25.0, _READERS[0]),
            _fault(FaultKind.FREEZE_COORDINATOR, 34.2, 4.5),
        ],
        _TENTATIVE,
    ),
    "a tentative epoch that fails during a correction": Schedule(
        ("consistency", ConsistencyState.STABILIZATION, "max_delay_changed"),
        [
            _AWAY,
            *(_fault(FaultKind.SLOW_TASK, 34.0, 20.0, reader) for reader in _READERS),
            *(
                _fault(FaultKind.FAIL_TENTATIVE, at, 0.0, reader)
                for at in (36.0, 38.0, 40.0, 42.0, 44.0)
                for reader in _READERS
            ),
        ],
        _TENTATIVE,
    ),
    "an edit that leaves one of two replicas that disagree": Schedule(
        ("dispute", DisputePhase.OPEN, DisputeEvent.SINGLE_REPLICA),
        [
            _fault(FaultKind.EDIT_REPLICAS, 6.0, 25.0, target=1),
            _fault(FaultKind.WRONG_RESULT, 26.0, 0.0, target=1, other=_REPEATED),
        ],
        Variant(DIAMOND),
        first_seed=4,
    ),
    "an edit while pods wait behind their gates": Schedule(
        ("slot", SlotPhase.GATED, SlotEvent.LOSS_FOUND),
        [  # of three nodes at least, until others come
            *(_fault(FaultKind.KILL_NODE, 20.0, 20.0) for _ in range(3)),
            _fault(FaultKind.EDIT_TEMPLATE, 28.0, 3.0),
        ],
        Variant(CHAIN),
    ),
}
"""What leads to a transition that random faults hardly ever lead to, by what happens."""


def run_schedule(name: str) -> list[SimulationOutcome]:
    """The outcomes of its seeds up to the first one that fails, or in which the transition has
    happened; of 40 at most."""
    schedule, outcomes = SCHEDULES[name], list[SimulationOutcome]()
    for seed in range(schedule.first_seed, schedule.first_seed + _MAX_SEEDS):
        outcomes.append(outcome := simulate(seed, schedule.faults, schedule.variant))
        if outcome.failure is not None or outcome.cells.get(schedule.cell):
            break
    return outcomes
