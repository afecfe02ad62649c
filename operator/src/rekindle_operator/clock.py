"""The clock of this process: seconds since 1970, without jumps.

Ages of Leases, reports and responses are differences of two readings. The machine's clock may be
set between them (NTP after a start, a virtual machine that moved): a step of six seconds forward
makes every coordinator look silent, and after a step back lost ones look alive for six seconds. So
this clock follows the monotonic clock, and is only adjusted slowly to the machine's.

Design: docs/design/kubernetes.md#time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MAX_SLEW = 0.05  # seconds of correction in a second


class SteadyClock:
    """May be called from any thread."""

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._now, self._read_at = wall(), elapsed()

    def __call__(self) -> float:
        with self._lock:
            read_at = self._elapsed()
            passed_s, self._read_at = read_at - self._read_at, read_at
            self._now += passed_s
            most_s = _MAX_SLEW * passed_s
            self._now += min(max(self._wall() - self._now, -most_s), most_s)
            return self._now
