"""When a sink is opened, which epochs are written to it, and when conflicts are checked. Pure.

A sink consumes the task's output log from `from_epoch` on, one call at a time. Epochs up to the
restore point are durable, because an entry is committed only after its partition's sinks have
written. Before its first write its newest epoch is read; epochs of an earlier boot are skipped, but
compared from `compare_files_from` on, because that boot's log may have been wrong. A call that
failed is made again after a back-off. Epochs above `through` wait, because replicas disagree about
them. A sink that commits groups of epochs writes a group once the log has all of it. Does not know
the log's files, nor the engine.

Design: docs/design/exactly-once.md#sinks.
Paper: FlameStream (Trofimov et al. 2019), section V-A2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy
from rekindle.protocol import SinkAssignment, SinkProgress
from rekindle.streams.epochs import NO_EPOCH, last_of_group

_BACKOFF = BackoffPolicy(first_s=0.1, longest_s=5.0)
RETRY_CONFLICTS_S = 5.0
"""Seconds between checks of the conflicting files: they may have been deleted."""
_PAUSE_FACTOR = 4
"""The pause between checks is at least this many times as long as the last check, so that on a slow
store most of the thread's time is left for writing."""


@dataclass(frozen=True, slots=True)
class OpenSink:
    """Open the sink and read its newest epoch; `after`: epochs through this one are known to be
    durable. `read_first_epoch`: read its first epoch too."""

    after: int
    read_first_epoch: bool


@dataclass(frozen=True, slots=True)
class WriteEpochs:
    """Write what the log holds from an epoch on, in whole groups, as long as `may_write` accepts
    it."""

    from_epoch: int


@dataclass(frozen=True, slots=True)
class CheckConflicts:
    """Check the epochs in conflict again, of those that `may_write` accepts."""


SinkEffect = OpenSink | WriteEpochs | CheckConflicts


class SinkCore:
    """One query's sink. `written_through`: epochs through it are certainly durable; `through`: no
    epoch above it may be written; None: all may. `next_epoch`: the first that is not durable;
    `problem`: why the newest call failed; None after a success."""

    def __init__(
        self,
        assigned: SinkAssignment,
        written_through: int,
        compare_files_from: int | None = None,
        through: int | None = None,
    ) -> None:
        self.assigned = assigned
        self.next_epoch = max(assigned.from_epoch, written_through + 1)
        self.conflict: str | None = None
        self.problem: str | None = None
        self._compare_files_from = compare_files_from
        self._compare_through = NO_EPOCH  # the newest epoch in the sink when it was opened
        self._epochs_per_commit = 1
        self._through = through
        self._log_last = NO_EPOCH
        self._opened = False
        self._call: SinkEffect | None = None
        self._call_began = -math.inf
        self._check_at = -math.inf
        self._failures = 0  # in a row
        self._retry_at = -math.inf

    @property
    def wake_at(self) -> float | None:
        if self._call is not None:
            return None
        if self._failures:
            return self._retry_at
        return self._check_at if self.conflict is not None else None

    @property
    def compares(self) -> bool:
        """Whether files of earlier boots are yet to be compared, or differ."""
        if self._compare_files_from is None:
            return False
        written = self._opened and self.next_epoch > self._compare_through
        return not written or self.conflict is not None

    def progress(self) -> SinkProgress:
        return SinkProgress(
            assigned=self.assigned, durable=self.next_epoch - 1, conflict=self.conflict
        )

    def may_write(self, epoch: int) -> bool:
        return self._through is None or epoch <= self._through

    def has_written(self, through: int) -> bool:
        """Whether it is durable through an epoch, or as far as it may write."""
        last = self._last_of_next_group
        return self.next_epoch > through or last > through or not self.may_write(last)

    def woken(self, now: float) -> list[SinkEffect]:
        """Time has passed."""
        return self._next_call(now)

    def log_grew(self, last: int, now: float) -> list[SinkEffect]:
        """The output log holds epochs through `last`."""
        self._log_last = last
        return self._next_call(now)

    def write_limit_changed(self, through: int | None, now: float) -> list[SinkEffect]:
        """No epoch above `through` may be written; None: all may."""
        self._through = through
        return self._next_call(now)

    def opened(
        self, last: int, first: int | None, now: float, epochs_per_commit: int = 1
    ) -> list[SinkEffect]:
        """`last`: the newest epoch that need not be written; `first`: the first one that the
        definition may write, if it was read."""
        self._epochs_per_commit = epochs_per_commit
        self._compare_through = last  # before `_opened`: another thread reads `compares`
        self._opened, self._call = True, None
        self.next_epoch = max(self.next_epoch, self._first_to_write(last, first))
        return self._next_call(now)

    def epoch_written(self, epoch: int, conflict: str | None, now: float) -> list[SinkEffect]:
        """The epochs of the call in progress through this one are durable. `conflict`: of the
        sink, after it."""
        self.next_epoch, self.conflict = epoch + 1, conflict
        return self._next_call(now)

    def write_ended(self, now: float) -> list[SinkEffect]:
        self._succeeded()
        return self._next_call(now)

    def conflicts_checked(self, conflict: str | None, now: float) -> list[SinkEffect]:
        self.conflict = conflict
        self._schedule_check(now)
        self._succeeded()
        return self._next_call(now)

    def call_failed(self, message: str, now: float) -> list[SinkEffect]:
        if isinstance(self._call, CheckConflicts):
            self._schedule_check(now)
        self._call, self.problem = None, message
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)
        return self._next_call(now)

    def call_abandoned(self, now: float) -> list[SinkEffect]:
        """The thread that made the call has died; the call is made again."""
        self._call = None
        return self._next_call(now)

    def _next_call(self, now: float) -> list[SinkEffect]:
        if self._call is not None or now < self._retry_at:
            return []
        if not self._opened:
            self._call = OpenSink(self.next_epoch - 1, self._compare_files_from is not None)
        elif self.conflict is not None and now >= self._check_at:
            self._call = CheckConflicts()
        elif self._log_last >= (last := self._last_of_next_group) and self.may_write(last):
            self._call = WriteEpochs(self.next_epoch)
        else:
            self._succeeded()
            return []
        self._call_began = now
        return [self._call]

    @property
    def _last_of_next_group(self) -> int:
        return last_of_group(self.next_epoch, self._epochs_per_commit)

    def _first_to_write(self, last: int, first: int | None) -> int:
        if self._compare_files_from is None or first is None:
            return last + 1
        return min(last + 1, max(self._compare_files_from, first))

    def _succeeded(self) -> None:
        self._call, self._failures, self.problem = None, 0, None

    def _schedule_check(self, now: float) -> None:
        took_s = now - self._call_began
        self._check_at = now + max(RETRY_CONFLICTS_S, _PAUSE_FACTOR * took_s)


@dataclass(frozen=True, slots=True)
class StopWriter:
    query: str


@dataclass(frozen=True, slots=True)
class StartWriter:
    assigned: SinkAssignment


def assignment_changes(
    current: Mapping[str, SinkAssignment], wanted: Iterable[SinkAssignment]
) -> list[StopWriter | StartWriter]:
    """The changes from `current`, the running writers by query, to the assigned ones. A writer that
    would write to another place, or from another epoch on, is replaced."""
    assigned = {s.query: s for s in wanted}
    kept = {q for q, s in current.items() if q in assigned and s.writes_same_output_as(assigned[q])}
    stop = [StopWriter(q) for q in current if q not in kept]
    start = [StartWriter(s) for q, s in assigned.items() if q not in kept]
    return [*stop, *start]
