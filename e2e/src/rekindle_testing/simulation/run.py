"""One simulation: a topology, its faults, and whether all is done once nothing fails.

Design: docs/simulation.md.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rekindle.coordinator.model import Generation, Partition
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_generation
from rekindle_testing.simulation.checks import Violation
from rekindle_testing.simulation.cluster import SimulatedCluster
from rekindle_testing.simulation.faults import (
    FAULTS_S,
    GROUP_S,
    LONGEST_S,
    Fault,
    Injector,
    draw_faults,
    heal_all,
)
from rekindle_testing.simulation.scheduler import Scheduler

_HEALED_S = FAULTS_S + GROUP_S + LONGEST_S
_QUIET_S = 90.0
"""Within so many seconds after the last fault all has to be done."""
_BEHIND_EPOCHS = 4
_INTERVAL_EPOCHS = 4

CHAIN = (
    SimulatedSegment("src"),
    SimulatedSegment("mid", ("src",), query=True),
)
DIAMOND = (
    SimulatedSegment("src", replicas=2),
    SimulatedSegment("left", ("src",), partitions=2, replicas=2, query=True),
    SimulatedSegment("right", ("src",)),
    SimulatedSegment("both", ("left", "right"), query=True),
)
DEEP = (
    SimulatedSegment("one", partitions=2),
    SimulatedSegment("two", replicas=2),
    SimulatedSegment("join", ("one", "two"), partitions=2),
    SimulatedSegment("last", ("join",), replicas=2, query=True),
    SimulatedSegment("side", ("two",), query=True),
)
TOPOLOGIES = (CHAIN, DIAMOND, DEEP)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`failure`: the violated invariant, or what is not done; None if all is well. `seconds`: from
    the end of the last fault until all was done."""

    seed: int
    faults: Sequence[Fault]
    failure: str | None
    seconds: float
    appended: int
    written: int
    lines: Sequence[str]


class Simulation:
    """`lines`: what happened."""

    def __init__(self, seed: int, faults: Sequence[Fault] | None = None) -> None:
        random = Random(f"plan {seed}")
        segments = random.choice(TOPOLOGIES)
        nodes = random.randint(3, 7)
        drawn = draw_faults(random)
        self.seed = seed
        self.faults = drawn if faults is None else faults
        self.lines: list[str] = []
        self.scheduler = Scheduler(seed)
        self.generation: Generation = make_generation(segments, interval_epochs=_INTERVAL_EPOCHS)
        self.cluster = SimulatedCluster(self.scheduler, self.generation, nodes)
        Injector(self.cluster, self._log).plan(self.faults)

    def _log(self, text: str) -> None:
        self.lines.append(f"{self.scheduler.now:7.2f}  {text}")

    def run(self) -> Outcome:
        failure, done_after = None, 0.0
        try:
            self.scheduler.run_until(_HEALED_S)
            heal_all(self.cluster)
            self._log("nothing fails any more")
            healed_at = self.scheduler.now
            while (left := self.not_done()) and self.scheduler.now < healed_at + _QUIET_S:
                self.scheduler.run_until(self.scheduler.now + 0.5)
            done_after = self.scheduler.now - healed_at
            if left:
                failure = f"not done {_QUIET_S:g} s after the last fault: {'; '.join(left)}"
        except Violation as violation:
            failure = str(violation)
        except Exception as error:  # of a core: an event that it does not expect
            failure = f"{type(error).__name__}: {error}"
            self._log(traceback.format_exc())
        if failure is not None:
            self._log(failure)
        checks = self.cluster.checks
        return Outcome(
            self.seed,
            self.faults,
            failure,
            done_after,
            checks.appended_epochs,
            checks.written_epochs,
            self.lines,
        )

    def not_done(self) -> list[str]:
        """What is missing until all is as if nothing had failed."""
        cluster = self.cluster
        interval_s = cluster.generation.interval_s
        head = int(self.scheduler.now / interval_s) - _BEHIND_EPOCHS
        left = []
        for segment in cluster.generation.topology.segments:
            for index in range(segment.partitions):
                for query in segment.queries:
                    durable = cluster.sinks.durable(query, Partition(segment.id, index))
                    if durable < head:
                        left.append(f"query {query}/{index} has written {durable} of {head}")
        for slot, pod in cluster.pods.items():
            phase = pod.boot.core.status.phase if pod.boot is not None else None
            if phase != "Live":
                left.append(f"{slot.key} incarnation {pod.incarnation} is {phase}")
        newest = cluster.store.newest
        committed = newest.epoch if newest is not None else -1
        if committed < head - 3 * _INTERVAL_EPOCHS:
            left.append(f"committed is {committed} of {head}")
        return left


def simulate(seed: int, faults: Sequence[Fault] | None = None) -> Outcome:
    return Simulation(seed, faults).run()


def shortest(outcome: Outcome) -> Outcome:
    """The same failure with fewer faults: each is left out as long as it still fails."""
    best, index = outcome, 0
    while index < len(best.faults):
        without = [*best.faults[:index], *best.faults[index + 1 :]]
        tried = simulate(outcome.seed, without)
        if tried.failure is not None:
            best = tried
        else:
            index += 1
    return best
