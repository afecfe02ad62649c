"""The interface of sinks: each epoch of a stream partition is written once.

A sink may make several epochs durable at once (a transaction, a snapshot of a table): a *group*.
Groups end at the same epochs everywhere, so that whoever goes on after a crash finds a whole number
of them.

FlameStream's barrier: one bundle (here: epoch) is in flight at a time, and the external system
stores it atomically and can return the last one. Because epochs are deterministic, a sink needs no
transaction with the checkpoints: after a restart it reads the last epoch, and skips epochs that are
already stored.

Design: docs/design/exactly-once.md#sinks.
Paper: FlameStream (Trofimov et al. 2019), section V-A2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.streams.epochs import NO_EPOCH, EpochBatch


class Sink(Protocol):
    """One query's output from one partition of its stream."""

    @property
    def conflict(self) -> str | None:
        """A message about epochs that were already stored with different rows; None if there are
        none."""
        ...

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        """Check again the epochs in conflict that `may_write` accepts: an epoch that was deleted is
        written, and one that has the right rows now is no longer in conflict. Raises
        SinkRefused."""
        ...

    def first_epoch(self) -> int:
        """The first epoch that this definition may write."""
        ...

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        """The newest epoch that need not be written: the highest of the newest one in the external
        system, the one before this definition's first (`rekindle.connectors.epoch_ranges`), and
        `after`; NO_EPOCH if none. The caller knows that epochs through `after` are stored, so the
        external system need not be searched for them."""
        ...

    @property
    def epochs_per_commit(self) -> int:
        """How many epochs a group has (`rekindle.streams.epochs.last_of_group`)."""
        ...

    def write(self, batch: EpochBatch) -> bool:
        """Write a stable epoch; with one epoch to a group it is durable then. True if this call
        created it; False if it has no rows, or if it already existed (written by another replica or
        an earlier boot) and was compared. Raises SinkRefused if it cannot be written now; the call
        may be repeated."""
        ...

    def commit(self, through: int) -> None:
        """Make the epochs durable that were written since the last group: all of them or none.
        `through`: the last epoch of the group. Raises SinkRefused; then the group has to be written
        again, unless it is durable by then."""
        ...

    def discard(self) -> None:
        """Forget what was written of a group that is not committed."""
        ...

    def close(self) -> None:
        """No call comes after it. Never raises."""
        ...


class EpochSink:
    """What sinks have in common whose `write` is durable: a group has one epoch."""

    epochs_per_commit = 1

    def commit(self, through: int) -> None:
        """It is durable."""

    def discard(self) -> None:
        """There is nothing."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink is opened for: one partition of the stream of `query`, rows of `schema`. Without
    a `definition`, nothing else may write to the URL (`rekindle run`). `event_time`: the column
    that has it, if there is one; `store`: the URL of the checkpoint store."""

    query: str
    partition: int
    topology_uid: str
    schema: pa.Schema
    definition: Definition | None = None
    event_time: str | None = None
    epoch_interval_us: int = 1_000_000
    store: str | None = None


OpenSink = Callable[[Any, SinkContext], Sink]
"""Opens a sink with the options of its kind. Raises SinkRefused if the URL belongs to another
topology."""
