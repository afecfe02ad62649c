"""State of the probes of kubelets and pods: when each was probed, and when it responded.

The probe thread (`probe`) writes it, the control loop reads it.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import replace

from rekindle_operator.cluster.model import ProbeResults

TICK_S = 0.25
_LATE_S = 2 * TICK_S


class ProbeState:
    """Keyed by uid. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[str, ProbeResults] = {}
        self._in_flight: set[str] = set()
        self._ticked_at: float | None = None

    @property
    def results(self) -> Mapping[str, ProbeResults]:
        with self._lock:
            return dict(self._results)

    @property
    def in_flight(self) -> Set[str]:
        """uids with a probe in flight."""
        with self._lock:
            return frozenset(self._in_flight)

    def reset_after_pause(self, now: float) -> None:
        """To be called every `TICK_S`. After a late tick, timers are reset: this process did not
        run, and sent and read nothing. If time went backwards, the clock was set, and all is
        forgotten."""
        with self._lock:
            since = 0.0 if self._ticked_at is None else now - self._ticked_at
            self._ticked_at = now
            if since < 0:
                self._results.clear()
            elif since > _LATE_S:
                self._reset_timers(now)

    def reset_timers(self, until: float) -> None:
        """Silence before `until` does not count."""
        with self._lock:
            self._reset_timers(until)

    def _reset_timers(self, until: float) -> None:
        for uid, known in self._results.items():
            if known.unanswered_since is not None:
                self._results[uid] = replace(
                    known, unanswered_since=max(known.unanswered_since, until)
                )

    def sent(self, uid: str, at: float) -> None:
        with self._lock:
            known = self._results.get(uid, ProbeResults(at))
            first = at if known.unanswered_since is None else known.unanswered_since
            self._results[uid] = replace(known, sent_at=at, unanswered_since=first)
            self._in_flight.add(uid)

    def responded(self, uid: str) -> None:
        with self._lock:
            known = self._results.get(uid)
            if known is not None:
                self._results[uid] = replace(
                    known, responded_at=known.sent_at, unanswered_since=None
                )

    def ended(self, uid: str) -> None:
        """The probe got a response, was refused, or timed out."""
        with self._lock:
            self._in_flight.discard(uid)

    def retain(self, uids: Set[str]) -> None:
        """Forget all others."""
        with self._lock:
            self._results = {uid: known for uid, known in self._results.items() if uid in uids}
