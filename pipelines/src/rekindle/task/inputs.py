"""The epochs of a source that a task reads itself, released by the wall clock (`core.source`). Does
not know engine, log or sinks.

Design: docs/design/epochs.md#cuts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rekindle.connectors.source import ReplayableSource
from rekindle.engine.bounds import CallBounds, CallBuilder
from rekindle.protocol import Upstream
from rekindle.streams.epochs import EpochInput
from rekindle.task.core.source import long_pause_problem, released_epoch, released_in_s
from rekindle.workers import CallTimer

Clock = Callable[[], float]
"""Unix time in seconds."""


class SourceInputs:
    """`take` is called by the engine's thread, the rest by any."""

    def __init__(
        self,
        source: ReplayableSource,
        next_epoch: int,
        watermark: int,
        *,
        origin_us: int,
        epoch_interval_us: int,
        clock: Clock = time.time,
    ) -> None:
        self._source = source
        self._next = next_epoch
        self._watermark = watermark
        self._origin_us = origin_us
        self._epoch_interval_us = epoch_interval_us
        self._clock = clock
        self._cut_ahead: EpochInput | None = None  # of epoch `_next`: it did not fit into the call
        self._calls = CallTimer()
        self._closed = threading.Event()

    def head(self) -> int:
        """Newest epoch that time has released."""
        return released_epoch(self._clock(), self._origin_us, self._epoch_interval_us)

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        """The next complete epochs: at least one unless the timeout passes; more rows or bytes
        than `bounds` allows only if the first epoch alone has them."""
        if self.head() < self._next:
            wait_s = released_in_s(
                self._next, self._clock(), self._origin_us, self._epoch_interval_us
            )
            self._closed.wait(min(timeout_s, wait_s))
        call = CallBuilder(bounds)
        while not call.full and self._next <= self.head():
            try:
                self._cut_ahead = self._cut_ahead or self._cut()
            except Exception:
                if not call.epochs:
                    raise
                break  # the next call raises it again
            if not call.add(self._cut_ahead):
                break
            self._watermark, self._cut_ahead = self._cut_ahead.watermark, None
            self._next += 1
        return call.epochs

    def _cut(self) -> EpochInput:
        with self._calls.during(f"reading epoch {self._next} of the source"):
            cut = self._source.cut(self._next)
        after = max(self._watermark, cut.watermark)
        return EpochInput(self._next, self._watermark, after, (cut.rows,))

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """A source has no upstreams."""

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        resumes_at = self._source.next_epoch_to_cut(self._next)
        return self._calls.problem or long_pause_problem(
            self._next, resumes_at, self._epoch_interval_us
        )

    def close(self) -> None:
        self._closed.set()
        self._source.close()
