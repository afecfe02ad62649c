"""The history of a topology, recorded from samples of its status. Pure: no I/O, no clock.

An observer adds samples of `status`, and events of the cluster. The checks and the timeline of the
demo and the failure tests read the result. Times are seconds since the history began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DOWN_STATES = frozenset({"Waiting", "Starting", "Restoring", "Failed"})
"""States in which a query writes no results; in CatchingUp it writes them late."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A query entered `state` at `at_s`."""

    at_s: float
    query: str
    state: str


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened to the cluster: `kind` is lost, joined or note."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Outage:
    """A query's outage and recovery. Times are None for what has not happened (yet)."""

    query: str
    lost_s: float
    restored_s: float | None
    live_s: float | None


@dataclass(slots=True)
class History:
    """`plans`: each recovery plan, as names of queries in order, with the time from which it was in
    effect; `progress`: (time, query, stable epoch), each time that the epoch has risen."""

    changes: list[StateChange] = field(default_factory=list)
    events: list[ClusterEvent] = field(default_factory=list)
    plans: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    progress: list[tuple[float, str, int]] = field(default_factory=list)
    ended_s: float = 0.0

    def sample(self, at_s: float, status: Mapping[str, Any]) -> None:
        """Record a sample of `status`; only changes are kept."""
        self.ended_s = at_s
        for query in status.get("queries", []):
            name, state = query["name"], query.get("state", "Waiting")
            if self.state(name) != state:
                self.changes.append(StateChange(at_s, name, state))
            epoch = query.get("stableEpoch", -1)
            if epoch > self.epoch(name):
                self.progress.append((at_s, name, epoch))
        plan = tuple((status.get("recovery") or {}).get("plan") or ())
        if plan and (not self.plans or self.plans[-1][1] != plan):
            self.plans.append((at_s, plan))

    def add_event(self, at_s: float, kind: str, text: str) -> None:
        self.events.append(ClusterEvent(at_s, kind, text))

    def queries(self) -> list[str]:
        return list(dict.fromkeys(c.query for c in self.changes))

    def state(self, query: str) -> str | None:
        return next((c.state for c in reversed(self.changes) if c.query == query), None)

    def epoch(self, query: str) -> int:
        return next((e for _, name, e in reversed(self.progress) if name == query), -1)

    def newest_epoch(self, until_s: float) -> int:
        """The highest stable epoch of any query until `until_s`; -1 if there was none."""
        return max((e for at_s, _, e in self.progress if at_s <= until_s), default=-1)

    def outage(self, query: str, since_s: float) -> Outage | None:
        """The first outage of the query that ends after `since_s`; None if there was none."""
        of_query = [c for c in self.changes if c.query == query]
        before = [c for c in of_query if c.at_s < since_s]
        after = before[-1:] + [c for c in of_query if c.at_s >= since_s]
        lost = next((c for c in after if c.state in DOWN_STATES), None)
        if lost is None:
            return None
        later = [c for c in after if c.at_s >= lost.at_s]
        restored = next((c.at_s for c in later if c.state in ("CatchingUp", "Live")), None)
        live = next((c.at_s for c in later if c.state == "Live"), None)
        return Outage(query, lost.at_s, restored, live)

    def plan_of_recovery(self, since_s: float, lost: Sequence[str]) -> tuple[str, ...]:
        """The recovery plan in effect when the first of the `lost` queries became Live again: that
        of an earlier loss, if the same queries come back in the same order."""
        outages = [o for q in lost if (o := self.outage(q, since_s))]
        returned = min((o.live_s for o in outages if o.live_s is not None), default=self.ended_s)
        plans = [plan for at_s, plan in self.plans if at_s <= returned]
        return plans[-1] if plans else ()
