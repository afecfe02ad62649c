"""State of the probes of kubelets and pods: when the last probe was sent, and when
the newest one with a response was.

The probe thread (`probe`) writes it, the control loop reads it.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from math import inf

from rekindle_operator.cluster.model import ProbeResults

TICK_S = 0.25
_LATE_S = 2 * TICK_S
_LONG_PAUSE_S = 2.0
_NEXT_AFTER_S = 2 * TICK_S
"""A probe that has no response for so long does not hold up the next one: packets of the one may
have been lost, and their retransmission takes a second or more."""
_ISOLATED_S = 0.8
"""If no node has responded to the probes of so long, this process may be what could not be reached.
Each tick with probes of suspects also probes nodes that responded to their last one. Longer than
two ticks, which may be a little late, so that one late response is not taken for a cut."""


class ProbeState:
    """Keyed by uid. Thread-safe. `detects_own_isolation`: for probes that show whether this process
    reaches other nodes; once it does again, silence of before does not count. Then `reconnected` is
    called with the time before which silence does not count."""

    def __init__(self, *, detects_own_isolation: bool = False) -> None:
        self._detects_isolation = detects_own_isolation
        self.reconnected: Callable[[float], None] = lambda until: None
        self._local: Set[str] = frozenset()  # no network is in between
        # Of all that are not local: when the last probe was sent that got a response, and since
        # when later ones have had none.
        self._newest_responded = -inf
        self._without_response_since: float | None = None
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

    def reset_after_pause(self, now: float) -> bool:
        """To be called every `TICK_S`. After a late tick, timers are reset: this process did not
        run, and sent and read nothing. If time went backwards, the clock was set, and all is
        forgotten. Returns whether it did not run for long."""
        with self._lock:
            gap_s = 0.0 if self._ticked_at is None else now - self._ticked_at
            self._ticked_at = now
            if gap_s < 0:
                self._results.clear()
                self._in_flight.clear()
                self._newest_responded, self._without_response_since = -inf, None
                self._reset_at = -inf
            elif gap_s > _LATE_S:
                self._reset_timers(now)
            return gap_s < 0 or gap_s > _LONG_PAUSE_S

    def reset_timers(self, until: float) -> None:
        """Silence before `until` does not count."""
        with self._lock:
            self._reset_timers(until)

    def _reset_timers(self, until: float) -> None:
        self._reset_at = max(self._reset_at, until)
        for uid, known in self._results.items():
            if known.unanswered_since is not None:
                since = self._counts_since(uid, known.unanswered_since)
                self._results[uid] = replace(known, unanswered_since=since)

    def _counts_since(self, uid: str, first: float) -> float:
        """Since when the silence counts that began with the probe sent at `first`: since the first
        one after the last reset; if there was none yet, until there is one, since the reset."""
        if first >= self._reset_at:
            return first
        later = (at for at in self._in_flight.get(uid, ()) if at >= self._reset_at)
        return next(later, self._reset_at)

    def sent(self, uid: str, at: float) -> None:
        with self._lock:
            known = self._results.get(uid, ProbeResults(at))
            first = known.unanswered_since
            if first is None or known.sent_at < first:  # not probed since a reset
                first = at
            self._results[uid] = replace(known, sent_at=at, unanswered_since=first)
            self._in_flight.setdefault(uid, []).append(at)
            if uid not in self._local and self._without_response_since is None:
                self._without_response_since = at

    def responded(self, uid: str, sent_at: float) -> None:
        """To the probe that was sent at `sent_at`."""
        with self._lock:
            known = self._results.get(uid)
            in_flight = self._in_flight.get(uid, [])
            # Not in flight: it was sent before the clock was set back.
            if known is None or sent_at not in in_flight:
                return
            self._reached_a_node(uid, sent_at)
            if sent_at < (known.answered_probe_at or -inf):
                return
            later = [at for at in in_flight if at > sent_at]
            unanswered_since = self._counts_since(uid, later[0]) if later else None
            self._results[uid] = replace(
                known, answered_probe_at=sent_at, unanswered_since=unanswered_since
            )

    def _reached_a_node(self, uid: str, sent_at: float) -> None:
        """A slow node's response to an earlier probe than the newest that got one shows nothing."""
        is_new = sent_at >= self._newest_responded
        if not self._detects_isolation or uid in self._local or not is_new:
            return
        self._newest_responded = sent_at
        since = self._without_response_since
        if since is not None and sent_at - since > _ISOLATED_S:
            self._reset_timers(sent_at)
            self.reconnected(sent_at)
        # It may be a late response: what was sent after that probe has none yet.
        remote = (sent for u, sent in self._in_flight.items() if u not in self._local)
        later = (at for sent in remote for at in sent if at > sent_at)
        self._without_response_since = min(later, default=None)

    def ended(self, uid: str, sent_at: float) -> None:
        """The probe got a response, was refused, or timed out."""
        with self._lock:
            sent = self._in_flight.get(uid, [])
            if sent_at in sent:
                sent.remove(sent_at)
            if not sent:
                self._in_flight.pop(uid, None)

    def retain(self, uids: Set[str], local: Set[str] = frozenset()) -> None:
        """Forget all others. `local`: those on the node of this process."""
        with self._lock:
            self._local = local
            self._results = {uid: known for uid, known in self._results.items() if uid in uids}
