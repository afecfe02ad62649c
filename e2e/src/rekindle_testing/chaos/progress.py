"""Progress of the sinks, compared with the states in the status: pure, no I/O, no clock.

The sinks' files show the real progress: a partition's files appear in the order of their epochs, so
if the newest one exists, all before it are written. Times are seconds on the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Newest = Mapping[str, Mapping[int, int]]
"""Query -> partition -> its newest epoch with a file."""


@dataclass(frozen=True, slots=True)
class StallWhileLive:
    """The status said Live although the query's next file was overdue by `overdue_s`."""

    query: str
    at_s: float
    overdue_s: float


@dataclass(slots=True)
class SinkPace:
    """`partition_counts`: query -> how many its sink has; `file_interval_s`: the time between two
    of its files without failures."""

    partition_counts: Mapping[str, int]
    file_interval_s: float
    _written: dict[str, int] = field(default_factory=dict)
    _advanced_at_s: dict[str, float] = field(default_factory=dict)
    _newest_written: int = -1

    @property
    def queries(self) -> Iterable[str]:
        return self.partition_counts

    def observe(self, at_s: float, newest: Newest) -> None:
        for query, count in self.partition_counts.items():
            found = newest.get(query, {})
            self._newest_written = max(self._newest_written, *found.values(), -1)
            written = min((found.get(p, -1) for p in range(count)), default=-1)
            if written > self.written(query):
                self._written[query] = written
                self._advanced_at_s[query] = at_s

    def written(self, query: str) -> int:
        """The epoch through which every partition of the query's sink is written; -1: none."""
        return self._written.get(query, -1)

    @property
    def newest_written(self) -> int:
        """The newest epoch that any partition of any query has written."""
        return self._newest_written

    @property
    def written_through(self) -> int:
        """The epoch through which every query is written."""
        return min(self.written(query) for query in self.queries)

    def behind(self, epoch: int) -> dict[str, int]:
        """Queries that are not written through `epoch`, and how far they are."""
        return {q: self.written(q) for q in self.queries if self.written(q) < epoch}

    def find_stalls_while_live(
        self, at_s: float, states: Mapping[str, str]
    ) -> list[StallWhileLive]:
        """Of queries that are reported as Live: since when their next file is overdue."""
        return [
            StallWhileLive(query, at_s, overdue_s)
            for query in self.queries
            if states.get(query) == "Live"
            and (since_s := self._advanced_at_s.get(query)) is not None
            and (overdue_s := at_s - since_s - self.file_interval_s) > 0
        ]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1]
