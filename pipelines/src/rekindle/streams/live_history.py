"""The order of a task's output: stable epochs, tentative ones, UNDO and REC_DONE. Pure.

Readers of tentative results read in this order. It is kept as spans: consecutive epochs of one
branch, or a control (UNDO or REC_DONE). Stable epochs after the newest span are in none, so a task
without failures has none. Rows are in logs, and the order is lost with the process, as its
tentative results are.

Design: docs/design/streams.md#branches.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.4.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from rekindle.streams.epochs import NO_EPOCH, BatchKind

MAX_SPANS = 4096
"""The oldest ones are dropped; readers that are still there continue after them."""


class Position(NamedTuple):
    """Where a reader is: the number of a span, and the next epoch in it."""

    span: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Span:
    """What a reader gets next: epochs `first..last` of a branch; or a control, with the epoch that
    it names as both."""

    kind: BatchKind
    attempt: int
    number: int
    first: int
    last: int

    @property
    def is_control(self) -> bool:
        return self.kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE)


@dataclass(slots=True)
class _StoredSpan:
    kind: BatchKind
    attempt: int
    first: int
    last: int


class LiveHistory:
    """`stable` is always the newest stable epoch in the log. `tentative`: the newest tentative
    epoch that no REC_DONE has followed; `corrected`: the epoch of the newest REC_DONE."""

    def __init__(self) -> None:
        self.tentative = NO_EPOCH
        self.corrected = NO_EPOCH
        self._spans: deque[_StoredSpan] = deque()
        self._base = 0  # number of the first span
        self._stable = NO_EPOCH  # newest one in a span

    def append(self, kind: BatchKind, epoch: int, stable: int, attempt: int = 0) -> None:
        """A tentative epoch, or a control."""
        if stable > self._stable:
            self._add(_StoredSpan(BatchKind.STABLE, attempt=0, first=self._stable + 1, last=stable))
            self._stable = stable
        if kind is BatchKind.RECONCILIATION_DONE:
            self.tentative, self.corrected = NO_EPOCH, epoch
        elif kind is BatchKind.TENTATIVE:
            self.tentative = max(self.tentative, epoch)
            newest = self._spans[-1] if self._spans else None
            if newest is not None and (newest.kind, newest.attempt, newest.last + 1) == (
                kind,
                attempt,
                epoch,
            ):
                newest.last = epoch
                return
        self._add(_StoredSpan(kind, attempt, epoch, epoch))

    def _add(self, span: _StoredSpan) -> None:
        self._spans.append(span)
        if len(self._spans) > MAX_SPANS:
            self._drop_first()

    def _drop_first(self) -> None:
        self._spans.popleft()
        self._base += 1

    # -- what is gone ----------------------------------------------------------------------------

    def truncate(self, floor: int) -> None:
        """Nobody needs what is about epochs through `floor`, which are stable."""
        while self._spans and self._spans[0].last <= floor:
            self._drop_first()

    def attempts(self) -> frozenset[int]:
        """Attempts whose epochs can be read."""
        return frozenset(s.attempt for s in self._spans if s.kind is BatchKind.TENTATIVE)

    def begin_at(self, attempt: int, base: int) -> None:
        """Epochs of an attempt before `base` are gone."""
        for span in self._spans:
            if span.attempt == attempt:
                span.first = max(span.first, base)

    # -- reading ---------------------------------------------------------------------------------

    def begin(self, from_epoch: int, stable: int) -> Position:
        """Where a reader begins that needs epochs from this one on: at its stable version, unless
        newer epochs are tentative."""
        tentative = self.tentative > stable
        for at, span in enumerate(self._spans):
            is_read = span.kind is BatchKind.STABLE or (
                tentative and span.kind is BatchKind.TENTATIVE
            )
            if is_read and span.last >= from_epoch:
                return Position(self._base + at, from_epoch)
        return Position(self._base + len(self._spans), from_epoch)

    def has(self, position: Position) -> bool:
        """Whether it is in the spans that are kept, or right after them. False if it is gone, or
        its number is from another process."""
        return self._base <= position.span <= self._base + len(self._spans)

    def next(self, position: Position, from_epoch: int, stable: int) -> Span | None:
        """What follows a position: epochs from `from_epoch` on, or a control; None if there is
        nothing yet. A position that is gone, or of another process, begins again."""
        if not self.has(position):
            position = self.begin(from_epoch, stable)
        number, epoch = position
        while number < self._base + len(self._spans):
            span = self._spans[number - self._base]
            if span.kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE):
                return Span(span.kind, span.attempt, number, span.first, span.last)
            first = max(span.first, epoch, from_epoch)
            if first <= span.last:
                return Span(span.kind, span.attempt, number, first, span.last)
            number, epoch = number + 1, NO_EPOCH
        first = max(self._stable + 1, epoch, from_epoch)
        if first > stable:
            return None
        return Span(BatchKind.STABLE, attempt=0, number=number, first=first, last=stable)
