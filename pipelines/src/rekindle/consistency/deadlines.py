"""How long an epoch may wait for missing inputs. Pure.

An epoch waits min(alpha * X, X - p99) from the moment when its first batch arrived: X is
`maxDelay`, alpha is `availability.delayFraction`, p99 is of the time from when an epoch is due to
when its output is written, over the calls of the last minute: if X is hardly longer than a call,
one slow call makes the epochs after it tentative, and must not do so for long. X - p99 is taken as
X / 4 at least: an engine that is too slow for X must not have to compute tentative epochs too, only
because channels deliver one after another. Memory is bounded: arrival times are forgotten once the
wait of their epochs is over.

Design: docs/design/consistency.md#deadlines.
Paper: DPC (Balazinska et al. 2005), sections 2 and 3.3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

SAMPLED_S = 60.0
LEAST_SAMPLES, MAX_SAMPLES = 8, 128
"""p99 is computed from the calls of the last `SAMPLED_S`, but from at least and at most so many."""
LEAST_WAIT = 0.25
"""Minimum of X - p99, as a fraction of X."""
COMPLETE_WAIT = 4.0
"""How long complete epochs wait for the end of a failure before they are processed although it goes
on, as a multiple of X."""
LEAST_COMPLETE_WAIT_S = 10.0


class Deadlines:
    """`max_delay_s`: None if it is infinite. Times are the caller's, in seconds."""

    def __init__(self, delay_fraction: float, max_delay_s: float | None, next_epoch: int) -> None:
        self.max_delay_s = max_delay_s
        self._delay_fraction = delay_fraction
        self._calls: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # (end, duration)
        self._p99_s = 0.0
        self._expired_through = next_epoch - 1
        self._epochs: list[int] = []  # ascending: whenever a newer epoch has arrived, that epoch
        self._times: list[float] = []  # and the time

    @property
    def wait_s(self) -> float:
        x = self.max_delay_s
        if x is None:
            return math.inf
        return min(self._delay_fraction * x, max(x - self._p99_s, LEAST_WAIT * x))

    @property
    def complete_wait_s(self) -> float:
        """How long tentative epochs may hold up complete ones (S in docs/design/consistency.md)."""
        return max(COMPLETE_WAIT * (self.max_delay_s or 0.0), LEAST_COMPLETE_WAIT_S)

    @property
    def newest(self) -> int:
        """The newest epoch of which a batch has arrived."""
        return self._epochs[-1] if self._epochs else self._expired_through

    def processed(self, took_s: float, now: float) -> None:
        """How long output that is written now took: a tentative epoch from when it was due, a
        stable call from its begin. Ignored while `maxDelay` is infinite, as it is while the task is
        not Live: then calls have more epochs and take longer."""
        if self.max_delay_s is None:
            return
        self._calls.append((now, took_s))
        while len(self._calls) > LEAST_SAMPLES and now - self._calls[0][0] >= SAMPLED_S:
            self._calls.popleft()
        ordered = sorted(took_s for _, took_s in self._calls)
        self._p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1]

    def arrived(self, epoch: int, now: float) -> None:
        """A batch of an epoch has arrived. Channels deliver in order, so the first batch of an
        older epoch cannot arrive later."""
        if epoch > self.newest:
            self._epochs.append(epoch)
            self._times.append(now)

    def first_arrival(self, epoch: int) -> float:
        """Infinite if nothing has arrived; minus infinity if its wait is over and forgotten."""
        if epoch <= self._expired_through:
            return -math.inf
        at = bisect_left(self._epochs, epoch)
        return self._times[at] if at < len(self._times) else math.inf

    def deadline(self, epoch: int) -> float:
        """Infinite if nothing has arrived, or `maxDelay` is infinite."""
        wait_s, first = self.wait_s, self.first_arrival(epoch)
        return math.inf if math.inf in (wait_s, first) else first + wait_s

    def forget_before(self, epoch: int, now: float) -> None:
        """Forget the epochs before this one whose wait is over."""
        wait_s = self.wait_s
        forgotten = 0
        while (
            forgotten < len(self._epochs)
            and self._epochs[forgotten] < epoch
            and (wait_s == math.inf or self._times[forgotten] + wait_s <= now)
        ):
            forgotten += 1
        if forgotten:
            self._expired_through = self._epochs[forgotten - 1]
            del self._epochs[:forgotten], self._times[:forgotten]
