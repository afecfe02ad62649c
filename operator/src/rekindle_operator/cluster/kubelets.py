"""State of the probes of kubelets and pods: when each was probed, and when it answered.

The probe thread (`probe`) writes it, the control loop reads it.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import replace

from rekindle_operator.cluster.model import KubeletReplies

TICK_S = 0.25
_LATE_S = 2 * TICK_S


class KubeletProbeState:
    """Keyed by uid. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: dict[str, KubeletReplies] = {}
        self._open: set[str] = set()
        self._ticked_at: float | None = None

    @property
    def replies(self) -> Mapping[str, KubeletReplies]:
        with self._lock:
            return dict(self._replies)

    @property
    def open(self) -> Set[str]:
        """uids with a probe under way."""
        with self._lock:
            return frozenset(self._open)

    def ticked(self, now: float) -> None:
        """To be called every `TICK_S`. After a late tick, timers are reset: this process did not
        run, and sent and read nothing. If time went backwards, the clock was set, and all is
        forgotten."""
        with self._lock:
            since = 0.0 if self._ticked_at is None else now - self._ticked_at
            self._ticked_at = now
            if since < 0:
                self._replies.clear()
            elif since > _LATE_S:
                self._reset_timers(now)

    def reset_timers(self, until: float) -> None:
        """Silence before `until` does not count."""
        with self._lock:
            self._reset_timers(until)

    def _reset_timers(self, until: float) -> None:
        for uid, known in self._replies.items():
            if known.unanswered is not None:
                self._replies[uid] = replace(known, unanswered=max(known.unanswered, until))

    def asked(self, uid: str, at: float) -> None:
        with self._lock:
            known = self._replies.get(uid, KubeletReplies(at))
            first = at if known.unanswered is None else known.unanswered
            self._replies[uid] = replace(known, asked=at, unanswered=first)
            self._open.add(uid)

    def answered(self, uid: str) -> None:
        with self._lock:
            known = self._replies.get(uid)
            if known is not None:
                self._replies[uid] = replace(known, answered=known.asked, unanswered=None)

    def closed(self, uid: str) -> None:
        """The probe was answered, was refused, or timed out."""
        with self._lock:
            self._open.discard(uid)

    def keep(self, uids: Set[str]) -> None:
        """Forget all others."""
        with self._lock:
            self._replies = {uid: known for uid, known in self._replies.items() if uid in uids}
