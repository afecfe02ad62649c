"""The order of a task's output: stable epochs, tentative ones, UNDO and REC_DONE. Pure.

Readers of tentative results read in this order. It is kept as segments: runs of consecutive epochs
of one branch, and controls. Stable epochs after the newest other record need no segment, so a task
without failures has none. Rows are in logs, and nothing here survives the process: its tentative
results do not either.

Design: docs/design/streams.md#branches.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.4.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from rekindle.streams.epochs import NO_EPOCH, BatchKind

MAX_SEGMENTS = 4096
"""The oldest ones are dropped; who still reads there goes on behind them."""


class Position(NamedTuple):
    """Where a reader is: the number of a segment, and the next epoch in it."""

    segment: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Run:
    """What a reader gets next: epochs `first..last` of a branch; or a control, with the epoch that
    it names as both. `segment`: its number."""

    kind: BatchKind
    attempt: int
    segment: int
    first: int
    last: int

    @property
    def is_control(self) -> bool:
        return self.kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE)


@dataclass(slots=True)
class _Segment:
    kind: BatchKind
    attempt: int
    first: int
    last: int


class LiveHistory:
    """`stable` is always the newest stable epoch in the log. `tentative`: the newest tentative
    epoch that no REC_DONE has followed; `corrected`: of the newest REC_DONE."""

    def __init__(self) -> None:
        self.tentative = NO_EPOCH
        self.corrected = NO_EPOCH
        self._segments: deque[_Segment] = deque()
        self._base = 0  # number of the first segment
        self._stable = NO_EPOCH  # newest one in a segment

    def append(self, kind: BatchKind, epoch: int, stable: int, attempt: int = 0) -> None:
        """A tentative epoch, or a control."""
        if stable > self._stable:
            self._add(_Segment(BatchKind.STABLE, 0, self._stable + 1, stable))
            self._stable = stable
        if kind is BatchKind.RECONCILIATION_DONE:
            self.tentative, self.corrected = NO_EPOCH, epoch
        elif kind is BatchKind.TENTATIVE:
            self.tentative = max(self.tentative, epoch)
            newest = self._segments[-1] if self._segments else None
            if newest is not None and (newest.kind, newest.attempt, newest.last + 1) == (
                kind,
                attempt,
                epoch,
            ):
                newest.last = epoch
                return
        self._add(_Segment(kind, attempt, epoch, epoch))

    def _add(self, segment: _Segment) -> None:
        self._segments.append(segment)
        if len(self._segments) > MAX_SEGMENTS:
            self._drop_first()

    def _drop_first(self) -> None:
        self._segments.popleft()
        self._base += 1

    # -- what is gone ----------------------------------------------------------------------------

    def truncate(self, floor: int) -> None:
        """Nobody needs what is about epochs through `floor`, which are stable."""
        while self._segments and self._segments[0].last <= floor:
            self._drop_first()

    def attempts(self) -> frozenset[int]:
        """Whose epochs can be read."""
        return frozenset(s.attempt for s in self._segments if s.kind is BatchKind.TENTATIVE)

    def begin_at(self, attempt: int, base: int) -> None:
        """Epochs of an attempt before `base` are gone."""
        for segment in self._segments:
            if segment.attempt == attempt:
                segment.first = max(segment.first, base)

    # -- reading ---------------------------------------------------------------------------------

    def begin(self, from_epoch: int, stable: int) -> Position:
        """Where a reader begins that needs epochs from this one on: at its stable version, unless
        newer epochs are tentative."""
        tentative = self.tentative > stable
        for at, segment in enumerate(self._segments):
            is_run = segment.kind is BatchKind.STABLE or (
                tentative and segment.kind is BatchKind.TENTATIVE
            )
            if is_run and segment.last >= from_epoch:
                return Position(self._base + at, from_epoch)
        return Position(self._base + len(self._segments), from_epoch)

    def has(self, position: Position) -> bool:
        """Whether it is not gone, nor of another process."""
        return self._base <= position.segment <= self._base + len(self._segments)

    def next(self, position: Position, from_epoch: int, stable: int) -> Run | None:
        """What follows a position: epochs from `from_epoch` on, or a control; None if there is
        nothing yet. A position that is gone, or of another process, begins again."""
        if not self.has(position):
            position = self.begin(from_epoch, stable)
        number, epoch = position
        while number < self._base + len(self._segments):
            segment = self._segments[number - self._base]
            if segment.kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE):
                return Run(segment.kind, segment.attempt, number, segment.first, segment.last)
            first = max(segment.first, epoch, from_epoch)
            if first <= segment.last:
                return Run(segment.kind, segment.attempt, number, first, segment.last)
            number, epoch = number + 1, NO_EPOCH
        first = max(self._stable + 1, epoch, from_epoch)
        return Run(BatchKind.STABLE, 0, number, first, stable) if first <= stable else None
