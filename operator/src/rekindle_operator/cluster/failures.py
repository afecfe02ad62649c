"""Actions that fail repeatedly, for the condition `Degraded`. Pure.

A single failure is most often a conflict that the next pass resolves, so only two in a row are
reported. An action that is not tried any more is forgotten: it is no longer needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_REPORTED_AFTER = 2  # failures
_RETENTION_S = 90.0  # three times the longest wait between two attempts
_MAX_ACTIONS = 1000


@dataclass(frozen=True, slots=True)
class _Failure:
    topology_uid: str
    message: str
    times: int
    at: float


class ActionFailures:
    """Keyed by action: its key has the UID of its object or of its topology. Not thread-safe: the
    caller holds a lock."""

    def __init__(self) -> None:
        self._by_key: dict[str, _Failure] = {}

    def failed(self, topology_uid: str, key: str, message: str, now: float) -> None:
        known = self._by_key.pop(key, None)
        times = 1 if known is None else known.times + 1
        self._by_key[key] = _Failure(topology_uid, message, times, now)
        while len(self._by_key) > _MAX_ACTIONS:
            self._by_key.pop(next(iter(self._by_key)))

    def succeeded(self, key: str) -> None:
        self._by_key.pop(key, None)

    def by_topology(self, now: float) -> Mapping[str, str]:
        """One message for each topology, by its uid; it does not change while the same action
        fails."""
        self._by_key = {k: f for k, f in self._by_key.items() if now - f.at < _RETENTION_S}
        found: dict[str, str] = {}
        for key in sorted(self._by_key):
            failure = self._by_key[key]
            if failure.times >= _REPORTED_AFTER:
                found.setdefault(failure.topology_uid, f"{key} fails: {failure.message}")
        return found
