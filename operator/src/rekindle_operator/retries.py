"""When each action that failed is tried again, by its key. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy

POLICY = BackoffPolicy(first_s=0.5, longest_s=30.0, jitter=0.5)
_RETENTION_S = 600.0  # of a failure that is not retried any more


@dataclass(frozen=True, slots=True)
class _Failure:
    times: int
    not_before: float


class Retries:
    """Not thread-safe. `draw` gives numbers from 0 to 1."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._failures: dict[str, _Failure] = {}

    def is_due(self, key: str, now: float) -> bool:
        failure = self._failures.get(key)
        return failure is None or now >= failure.not_before

    def failed(self, key: str, now: float) -> float:
        """The seconds to wait. The first retry is immediate: most failures are conflicts."""
        times = self._failures[key].times + 1 if key in self._failures else 1
        wait_s = POLICY.wait_s(times - 1, self._draw())
        self._failures[key] = _Failure(times, now + wait_s)
        return wait_s

    def succeeded(self, key: str) -> None:
        self._failures.pop(key, None)

    def forget_old(self, now: float) -> None:
        kept = {k: f for k, f in self._failures.items() if now - f.not_before < _RETENTION_S}
        self._failures = kept

    def __len__(self) -> int:
        return len(self._failures)
