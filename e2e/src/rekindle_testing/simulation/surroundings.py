"""What all tasks of a simulation share."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.topology.model import Topology
from rekindle_testing.simulation.checks import Checks
from rekindle_testing.simulation.network import Network
from rekindle_testing.simulation.scheduler import Scheduler
from rekindle_testing.simulation.store_and_sinks import SimulatedSinks, SimulatedStore
from rekindle_testing.simulation.values import TaskComputation
from rekindle_testing.simulation.wrong_results import WrongResults


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`epoch_us`: the length of an epoch. `topology`: as it was
    created, without later edits. `buffered_epochs`: what a task
    whose output may be tentative keeps of a channel. `wrong_results`: which values are wrong, or
    follow from wrong ones. `replays_take_time`: whether a call takes as long as each of its epochs
    alone would."""

    scheduler: Scheduler
    network: Network
    store: SimulatedStore
    sinks: SimulatedSinks
    checks: Checks
    epoch_us: int
    checkpoint_interval_epochs: int
    topology: Topology
    buffered_epochs: int
    wrong_results: WrongResults
    computation: TaskComputation
    replays_take_time: bool
