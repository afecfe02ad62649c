"""The edge where results leave: a sink takes each epoch of a stream's partition once.

FlameStream's barrier: one bundle is outstanding at a time, the consumer takes a bundle whole and
can say which was the last. Because epochs are deterministic, a sink needs no transaction with the
checkpoints: on restart it asks, and drops what the consumer already has.

Design: docs/design/exactly-once.md#sinks.
Paper: FlameStream (Trofimov et al. 2019), section V-A2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.streams.epochs import EpochBatch


class Sink(Protocol):
    """One query's output from one partition of its stream."""

    @property
    def conflict(self) -> str | None:
        """Which bundles are there with other rows than those that were to be written, in words;
        None: none."""
        ...

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        """Look at those bundles again, where their epochs may be written: what was deleted is
        written, what has the right rows now is no conflict. Raises SinkRefused."""
        ...

    def first_epoch(self) -> int:
        """The first epoch that this definition may write."""
        ...

    def last_epoch(self) -> int:
        """The newest epoch that needs no writing, asked of the consumer: one that it holds, or the
        last before this definition's first (`rekindle.connectors.epoch_ranges`); NO_EPOCH if
        none."""
        ...

    def write(self, batch: EpochBatch) -> bool:
        """Make a stable epoch durable. True if this call created it; False if it has no rows, or if
        it was there (another replica, or an earlier boot) and was compared. When it returns, the
        epoch is durable. Raises SinkRefused if the consumer cannot take it now; the same call may
        be made again."""
        ...


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink is opened for: one partition of the stream of `query`, rows of `schema`. Without
    a `definition` nobody else may write to the place: a run by itself."""

    query: str
    partition: int
    topology_uid: str
    schema: pa.Schema
    definition: Definition | None = None


OpenSink = Callable[[Any, SinkContext], Sink]
"""Opens a sink with the options of its kind. Raises SinkRefused if the place is another's."""
