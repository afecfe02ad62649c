"""SUnion: merges batches from many upstream partitions into complete epochs in a fixed order.

An epoch is complete when every input partition has delivered it; its rows are then merged in the
order (input, partition, row) and its watermark is the minimum over those that are not idle (DPC's
boundary rule), so every replica and every replay sees the same epochs whatever the interleaving,
duplication or order of arrival. Pure: no I/O, no clock, no threads. Only stable batches are
accepted: tentative epochs are formed by `rekindle.consistency.live_union`.

Design: docs/design/streams.md#sunion.
Paper: DPC (Balazinska et al. 2005), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rekindle.errors import DifferentResults, RekindleError
from rekindle.streams.epochs import (
    BatchKind,
    EpochBatch,
    EpochInput,
    Result,
    merge_watermarks,
)


@dataclass(frozen=True, slots=True)
class Channel:
    """One partition of one input; `input` is its index in the segment's list of inputs."""

    input: int
    partition: int


class TentativeRefused(RekindleError):
    """A batch that is not STABLE reached a task that accepts only stable ones."""


@dataclass(slots=True)
class _Inbox:
    """The batches of one channel that are not part of a complete epoch yet."""

    batches: dict[int, EpochBatch] = field(default_factory=dict)
    bytes: int = 0


class SUnion:
    """`channels` in merge order: by input, then by partition."""

    def __init__(
        self,
        inputs: Sequence[Sequence[int]],
        next_epoch: int,
        watermark: int,
        max_bytes: int = 256 << 20,
    ) -> None:
        """`inputs`: the partitions read, for each input; `watermark`: after `next_epoch - 1`;
        `max_bytes`: of the memory of buffered epochs, over all channels."""
        self._inputs = len(inputs)
        self._inboxes = {Channel(i, p): _Inbox() for i, ps in enumerate(inputs) for p in sorted(ps)}
        if not self._inboxes:
            raise ValueError("an SUnion without inputs never completes an epoch")
        self.channel_bytes = max_bytes // len(self._inboxes)
        """Bytes of memory that may be buffered for each channel."""
        self.next_epoch = next_epoch
        self._missing = len(self._inboxes)  # channels that have not delivered `next_epoch`
        self._watermark = watermark

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(self._inboxes)

    @property
    def buffered_bytes(self) -> int:
        return sum(inbox.bytes for inbox in self._inboxes.values())

    def has_buffer_space(self, channel: Channel) -> bool:
        """Whether the channel may be read further. A channel that lacks the next epoch always may,
        so the bound cannot block the union."""
        inbox = self._inboxes[channel]
        return inbox.bytes < self.channel_bytes or self.next_epoch not in inbox.batches

    def missing(self) -> tuple[Channel, ...]:
        """The channels that the next epoch waits for."""
        return tuple(
            c for c, inbox in self._inboxes.items() if self.next_epoch not in inbox.batches
        )

    def add(self, channel: Channel, batch: EpochBatch) -> list[EpochInput]:
        """Add a batch and return the epochs that it completes, in order; a second batch of the
        same epoch is dropped if it equals the first. Raises TentativeRefused, DifferentResults."""
        inbox = self._inboxes[channel]
        if batch.kind is not BatchKind.STABLE:
            raise TentativeRefused(
                f"epoch {batch.epoch} of stream {batch.stream}/{batch.partition} is {batch.kind}; "
                f"only stable epochs are merged here"
            )
        if batch.epoch < self.next_epoch:
            return []
        known = inbox.batches.get(batch.epoch)
        if known is not None:
            _require_equal(known, batch)
            return []
        inbox.batches[batch.epoch] = batch
        inbox.bytes += batch.memory_bytes
        self._missing -= batch.epoch == self.next_epoch
        complete = []
        while not self._missing:
            complete.append(self._complete_epoch())
        return complete

    def _complete_epoch(self) -> EpochInput:
        epoch, before = self.next_epoch, self._watermark
        tables: list[list[pa.Table]] = [[] for _ in range(self._inputs)]
        watermarks = []
        for channel, inbox in self._inboxes.items():
            batch = inbox.batches.pop(epoch)
            inbox.bytes -= batch.memory_bytes
            tables[channel.input].append(batch.rows)
            watermarks.append((batch.watermark, batch.idle))
        merged, idle = merge_watermarks(watermarks)
        self._watermark = max(before, merged)
        self.next_epoch += 1
        self._missing = len(self.missing())
        rows = tuple(map(merge_rows, tables))
        return EpochInput(epoch, before, self._watermark, rows, idle=idle)


def merge_rows(tables: list[pa.Table]) -> pa.Table:
    """The rows of at least one table, in order."""
    rows = [table for table in tables if table.num_rows]
    return pa.concat_tables(rows) if rows else tables[0]


def _require_equal(known: EpochBatch, batch: EpochBatch) -> None:
    one, two = Result.of(known), Result.of(batch)
    if one != two:
        raise DifferentResults(
            f"two replicas of stream {batch.stream}/{batch.partition} disagree on epoch "
            f"{batch.epoch}: {one} and {two}"
        )
