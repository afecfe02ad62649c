"""When what has failed is tried again: exponential, capped, with jitter; by identity. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MEMORY_S = 600.0  # what nobody tried for so long is no longer wanted


@dataclass(frozen=True, slots=True)
class _Failure:
    times: int
    not_before: float


class Backoff:
    """Not for use by several threads at once. `jitter` gives numbers from 0 to 1."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._failures: dict[str, _Failure] = {}

    def is_due(self, key: str, now: float) -> bool:
        failure = self._failures.get(key)
        return failure is None or now >= failure.not_before

    def failed(self, key: str, now: float) -> float:
        """The wait. The first retry is made at once: most failures are conflicts."""
        times = self._failures[key].times + 1 if key in self._failures else 1
        longest_s = (
            0.0 if times == 1 else min(_FIRST_WAIT_S * 2 ** min(times - 2, 20), _LONGEST_WAIT_S)
        )
        wait_s = longest_s * (0.5 + 0.5 * self._jitter())
        self._failures[key] = _Failure(times, now + wait_s)
        return wait_s

    def succeeded(self, key: str) -> None:
        self._failures.pop(key, None)

    def forget_old(self, now: float) -> None:
        kept = {k: f for k, f in self._failures.items() if now - f.not_before < _MEMORY_S}
        self._failures = kept

    def __len__(self) -> int:
        return len(self._failures)
