"""When the control loop makes its next pass. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.settings import Timing

_SOONEST_S = 0.02
_STANDBY_INTERVAL_S = 5.0
_STANDBY_SHARE = 0.02  # of a core, at most, however many topologies there are


def wait_s(snapshot: Snapshot, now: float, timing: Timing) -> float:
    """Until the next pass if nothing changes: the next tick, or sooner, when a report expires."""
    expiries = (as_of + timing.report_fresh_s - now for as_of in snapshot.report_times.values())
    soonest_s = min((s for s in expiries if s > 0), default=timing.tick_s)
    return min(timing.tick_s, max(soonest_s, _SOONEST_S))


@dataclass(slots=True)
class StandbyPasses:
    """A replica that does not lead makes passes too, without executing actions: so all topologies
    are compiled before its first pass as the leader."""

    next_at: float = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self.next_at

    def record_pass(self, *, began: float, ended: float) -> None:
        self.next_at = ended + max(_STANDBY_INTERVAL_S, (ended - began) / _STANDBY_SHARE)
