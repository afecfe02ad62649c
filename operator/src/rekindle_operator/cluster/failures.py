"""Actions that the API server keeps refusing, for the condition `Degraded`. Pure.

One failure is most often a conflict that the next pass has solved; two in a row are said. What is
not tried any more is forgotten: it is not wanted any more, or has been decided otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LEAST = 2
_MEMORY_S = 90.0  # three times the longest wait between two tries
_MOST = 1000


@dataclass(frozen=True, slots=True)
class _Failure:
    owner: str
    message: str
    times: int
    at: float


class ActionFailures:
    """By the action's key. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._by_key: dict[str, _Failure] = {}

    def failed(self, owner: str, key: str, message: str, now: float) -> None:
        known = self._by_key.pop(key, None)
        times = 1 if known is None else known.times + 1
        self._by_key[key] = _Failure(owner, message, times, now)
        while len(self._by_key) > _MOST:
            self._by_key.pop(next(iter(self._by_key)))

    def succeeded(self, key: str) -> None:
        self._by_key.pop(key, None)

    def by_owner(self, now: float) -> Mapping[str, str]:
        """One of each topology's, in words that stay while it fails."""
        self._by_key = {k: f for k, f in self._by_key.items() if now - f.at < _MEMORY_S}
        found: dict[str, str] = {}
        for key in sorted(self._by_key):
            failure = self._by_key[key]
            if failure.times >= _LEAST:
                found.setdefault(failure.owner, f"{key} fails: {failure.message}")
        return found
