"""State of the probes of kubelets and pods: when each was probed, and when it responded.

The probe thread (`probe`) writes it, the control loop reads it.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import replace
from math import inf

from rekindle_operator.cluster.model import ProbeResults

TICK_S = 0.25
_LATE_S = 2 * TICK_S
_NEXT_AFTER_S = 2 * TICK_S
"""A probe that has no response for so long does not hold up the next one: packets of the one may
have been lost, and their retransmission takes a second or more."""


class ProbeState:
    """Keyed by uid. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[str, ProbeResults] = {}
        self._in_flight: dict[str, list[float]] = {}  # when each was sent
        self._ticked_at: float | None = None
        self._reset_at = -inf

    @property
    def results(self) -> Mapping[str, ProbeResults]:
        with self._lock:
            return dict(self._results)

    def busy(self, now: float) -> Set[str]:
        """uids with a probe in flight that may soon have a response: not to be probed yet."""
        with self._lock:
            return frozenset(
                uid for uid, sent in self._in_flight.items() if now - sent[-1] < _NEXT_AFTER_S
            )

    def reset_after_pause(self, now: float) -> None:
        """To be called every `TICK_S`. After a late tick, timers are reset: this process did not
        run, and sent and read nothing. If time went backwards, the clock was set, and all is
        forgotten."""
        with self._lock:
            gap_s = 0.0 if self._ticked_at is None else now - self._ticked_at
            self._ticked_at = now
            if gap_s < 0:
                self._results.clear()
                self._in_flight.clear()
                self._reset_at = -inf
            elif gap_s > _LATE_S:
                self._reset_timers(now)

    def reset_timers(self, until: float) -> None:
        """Silence before `until` does not count."""
        with self._lock:
            self._reset_timers(until)

    def _reset_timers(self, until: float) -> None:
        self._reset_at = until
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
            self._in_flight.setdefault(uid, []).append(at)

    def responded(self, uid: str, sent_at: float) -> None:
        """To the probe that was sent at `sent_at`."""
        with self._lock:
            known = self._results.get(uid)
            if known is None or sent_at < (known.responded_at or -inf):
                return
            later = [at for at in self._in_flight.get(uid, ()) if at > sent_at]
            unanswered_since = max(later[0], self._reset_at) if later else None
            self._results[uid] = replace(
                known, responded_at=sent_at, unanswered_since=unanswered_since
            )

    def ended(self, uid: str, sent_at: float) -> None:
        """The probe got a response, was refused, or timed out."""
        with self._lock:
            sent = self._in_flight.get(uid, [])
            if sent_at in sent:
                sent.remove(sent_at)
            if not sent:
                self._in_flight.pop(uid, None)

    def retain(self, uids: Set[str]) -> None:
        """Forget all others."""
        with self._lock:
            self._results = {uid: known for uid, known in self._results.items() if uid in uids}
