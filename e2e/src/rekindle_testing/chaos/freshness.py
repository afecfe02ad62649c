"""How soon a topology with a finite `maxDelay` has results of new epochs, stable or tentative:
pure, no I/O, no clock.

Seen from outside: an epoch has arrived at a partition when one of the tasks that the partition
reads has it, and the partition has a result of it when any of its replicas has it, in the log or
tentatively. The time from one to the other is not bounded, and does not count, while no replica is
Live, while engines are slow, and while nodes are frozen or cut off, whose epochs reach nobody.
Times are seconds on the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Partition = tuple[str, int]
"""A segment and an index."""


@dataclass(frozen=True, slots=True)
class TaskSample:
    """What the metrics of a task report. `task`: the uid of its pod; `stable`, `tentative`: the
    newest epoch of each; `epoch_p99_s`: time of an epoch in the engine."""

    task: str
    partition: Partition
    is_live: bool
    stable: int
    tentative: int
    epoch_p99_s: float

    @property
    def newest(self) -> int:
        return max(self.stable, self.tentative)


@dataclass(slots=True)
class Freshness:
    """`upstream`: the partitions that each one reads. `tentative`: how many tentative epochs were
    seen; `longest_s`: the longest time from an epoch's arrival to an observation without a result
    of it."""

    upstream: Mapping[Partition, frozenset[Partition]]
    max_delay_s: float
    tentative: int = 0
    longest_s: float = 0.0
    _newest: dict[Partition, int] = field(default_factory=dict)
    _arrivals: dict[Partition, dict[int, float]] = field(default_factory=dict)
    _live_since: dict[str, float] = field(default_factory=dict)
    _tentative_seen: dict[Partition, int] = field(default_factory=dict)
    _not_silent_since: float = -math.inf

    def observe(self, at_s: float, samples: list[TaskSample], *, silent: bool) -> None:
        """All tasks that respond now; `silent`: nodes are frozen or cut off."""
        # Live, and with an engine that is fast enough for `maxDelay`.
        in_time = [s for s in samples if s.is_live and s.epoch_p99_s <= self.max_delay_s / 4]
        self._live_since = {s.task: self._live_since.get(s.task, at_s) for s in in_time}
        if silent:
            self._not_silent_since = at_s
        for partition, upstream in self.upstream.items():
            own = [s for s in samples if s.partition == partition]
            self._note_arrivals(partition, upstream, samples, at_s)
            self._note_results(partition, own)
            since = min((self._live_since.get(s.task, math.inf) for s in own), default=math.inf)
            self._measure(partition, max(since, self._not_silent_since), at_s)

    def _note_arrivals(
        self,
        partition: Partition,
        upstream: frozenset[Partition],
        samples: list[TaskSample],
        at_s: float,
    ) -> None:
        arrived = max((s.newest for s in samples if s.partition in upstream), default=-1)
        arrivals = self._arrivals.setdefault(partition, {})
        for epoch in range(max(arrivals, default=arrived - 1) + 1, arrived + 1):
            arrivals[epoch] = at_s

    def _note_results(self, partition: Partition, own: list[TaskSample]) -> None:
        newest = max((s.newest for s in own), default=-1)
        self._newest[partition] = max(newest, self._newest.get(partition, -1))
        tentative = max((s.tentative for s in own), default=-1)
        if tentative > self._tentative_seen.get(partition, -1):
            self._tentative_seen[partition] = tentative
            self.tentative += 1

    def _measure(self, partition: Partition, since: float, at_s: float) -> None:
        """How long the oldest epoch without a result has waited."""
        arrivals, newest = self._arrivals[partition], self._newest[partition]
        waiting = [at for epoch, at in arrivals.items() if epoch > newest]
        if waiting:
            self.longest_s = max(self.longest_s, at_s - max(min(waiting), since))
        last = max(arrivals, default=-1)  # kept: `_note_arrivals` goes on after it
        self._arrivals[partition] = {e: t for e, t in arrivals.items() if e > newest or e == last}
