"""Which epochs a task may take, and how far it reads ahead. Pure.

The epochs of a source are released by time; the clock decides when an epoch is released, never what
is in it. Those of streams are complete when every upstream partition has delivered them; complete
epochs wait for the loop, and readers stop while too many bytes do.

Design: docs/design/epochs.md#cuts, docs/design/streams.md#sunion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rekindle.engine.bounds import CallBounds, take_ready
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.sunion import Channel, SUnion

_DAY_US = 86_400_000_000
LONG_PAUSE_US = 365 * _DAY_US
"""A gap without rows that a source reports as a problem."""


def released_epoch(now_s: float, origin_us: int, epoch_interval_us: int) -> int:
    """The newest epoch whose time has passed; `now_s`: Unix time."""
    return int((int(now_s * 1_000_000) - origin_us) // epoch_interval_us) - 1


def released_in_s(epoch: int, now_s: float, origin_us: int, epoch_interval_us: int) -> float:
    """How long until an epoch is released; 0 if it is."""
    return max(0.0, (origin_us + (epoch + 1) * epoch_interval_us) / 1e6 - now_s)


def long_pause_problem(
    next_epoch: int, resumes_at: int | None, epoch_interval_us: int
) -> str | None:
    """Reports pauses of years, which usually mean a row with a wrong time: the task would wait that
    long for the next row. `resumes_at`: its epoch; None if there is none."""
    if (
        resumes_at is None
        or (gap_us := (resumes_at - next_epoch) * epoch_interval_us) < LONG_PAUSE_US
    ):
        return None
    return (
        f"the source has no rows until epoch {resumes_at:,}, {gap_us // _DAY_US:,} days from now; "
        "correct the times of its rows, or raise speedup"
    )


class StreamsCore:
    """The epochs of upstream streams. `error`: why no more can be taken."""

    def __init__(
        self,
        inputs: Sequence[Sequence[int]],
        next_epoch: int,
        watermark: int,
        read_ahead_bytes: int,
    ) -> None:
        """`inputs`: the partitions read, for each input; `watermark`: after `next_epoch - 1`;
        `read_ahead_bytes`: of incomplete epochs that may be buffered, and as many of complete
        ones."""
        self.error: Exception | None = None
        self._union = SUnion(inputs, next_epoch, watermark, read_ahead_bytes)
        self._ready: deque[EpochInput] = deque()
        self._ready_bytes = 0
        self._read_ahead_bytes = read_ahead_bytes
        self._expected_bytes: dict[int, dict[Channel, int]] = {}  # bytes of incomplete epochs

    @property
    def channels(self) -> tuple[Channel, ...]:
        return self._union.channels

    @property
    def channel_bytes(self) -> int:
        """Bytes of memory that may be buffered for each channel."""
        return self._union.channel_bytes

    @property
    def may_take(self) -> bool:
        """Whether `take` returns epochs, or raises, now."""
        return bool(self._ready) or self.error is not None

    def failed(self, error: Exception) -> None:
        """The first error is kept."""
        self.error = self.error or error

    def announce(self, channel: Channel, epoch: int, size: int) -> int:
        """A channel will deliver so many bytes of an epoch. Returns the bytes of the epoch that all
        channels have announced: in the end they are merged, so all of them are in memory at a
        time."""
        if epoch < self._union.next_epoch:  # a repeated batch of a complete epoch, to be dropped
            return size
        sizes = self._expected_bytes.setdefault(epoch, {})
        sizes[channel] = size  # replaces the size of an earlier request
        return sum(sizes.values())

    def arrived(self, channel: Channel, batch: EpochBatch) -> None:
        """Raises TentativeRefused, DifferentResults; `error` keeps them too."""
        try:
            complete = self._union.add(channel, batch)
        except Exception as error:
            self.error = error
            raise
        for epoch in complete:
            self._expected_bytes.pop(epoch.epoch, None)
            self._ready.append(epoch)
            self._ready_bytes += epoch.memory_bytes

    def has_buffer_space(self, channel: Channel) -> bool:
        """Whether the channel may be read further."""
        return self._union.has_buffer_space(channel) and self._ready_bytes < self._read_ahead_bytes

    def take(self, bounds: CallBounds) -> list[EpochInput]:
        """The complete epochs of one call. Raises `error`."""
        if self.error is not None:
            raise self.error
        taken = take_ready(self._ready, bounds)
        self._ready_bytes -= sum(epoch.memory_bytes for epoch in taken)
        return taken
