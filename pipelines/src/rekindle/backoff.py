"""How long to wait before something that failed is attempted again. Pure.

The wait grows by a factor with each failure in a row, up to a limit. Jitter keeps processes that
failed together from retrying together. Nothing here sleeps: the caller waits (on an event, a
condition, with asyncio, or until a due time).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_MAX_EXPONENT = 30


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """`jitter`: the share of a wait that is random: a wait of 8 s with jitter 0.5 is one of 4 to
    8 s."""

    first_s: float
    longest_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def wait_s(self, failures: int, draw: float = 1.0) -> float:
        """The wait after so many consecutive failures; 0 after none. `draw`: from 0 to 1."""
        if failures <= 0:
            return 0.0
        growth = self.factor ** min(failures - 1, _MAX_EXPONENT)
        without_jitter_s = min(self.first_s * growth, self.longest_s)
        return without_jitter_s * (1.0 - self.jitter * (1.0 - draw))


class Backoff:
    """Counts the failures of one repeated action. Not thread-safe."""

    def __init__(self, policy: BackoffPolicy, draw: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._draw = draw
        self.failures = 0  # in a row

    def failed(self) -> float:
        """One more failure: how long to wait now, in seconds."""
        self.failures += 1
        return self._policy.wait_s(self.failures, self._draw())

    def succeeded(self) -> None:
        self.failures = 0
