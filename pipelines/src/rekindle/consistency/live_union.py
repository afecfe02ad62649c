"""SUnion of the tentative branch: forms epochs from the channels that have delivered them. Pure.

It keeps the newest version of each epoch of each channel: a stable batch rather than a tentative
one, and the batch of a later attempt rather than of an earlier one. An epoch is formed when the
consistency manager calls `form`, from the batches that have arrived, in the order (input,
partition, row), as `SUnion` does; its watermark is that of these, but never falls on the branch.
Does not know why a channel is missing.

Design: docs/design/consistency.md#tentative-epochs.
Paper: DPC (Balazinska et al. 2005), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rekindle.streams.epochs import BatchKind, EpochBatch, EpochInput, merge_watermarks
from rekindle.streams.sunion import Channel, merge_rows


@dataclass(slots=True)
class _Inbox:
    newest: int
    batches: dict[int, EpochBatch] = field(default_factory=dict)
    bytes: int = 0

    def put(self, batch: EpochBatch) -> None:
        self.drop(batch.epoch)
        self.batches[batch.epoch] = batch
        self.bytes += batch.memory_bytes

    def drop(self, epoch: int) -> None:
        batch = self.batches.pop(epoch, None)
        self.bytes -= batch.memory_bytes if batch is not None else 0


class LiveUnion:
    """`schemas`: of each input, for epochs without a batch of it."""

    def __init__(
        self, inputs: Sequence[Sequence[int]], schemas: Sequence[pa.Schema], next_epoch: int
    ) -> None:
        self._schemas = list(schemas)
        self._next_epoch = next_epoch
        self._inboxes = {
            Channel(i, p): _Inbox(next_epoch - 1)
            for i, partitions in enumerate(inputs)
            for p in sorted(partitions)
        }

    def add(self, channel: Channel, batch: EpochBatch) -> None:
        """Epochs before the next one are ignored."""
        inbox = self._inboxes[channel]
        inbox.newest = max(inbox.newest, batch.epoch)
        if batch.epoch < self._next_epoch:
            return
        known = inbox.batches.get(batch.epoch)
        if known is None or _version(known) < _version(batch):
            inbox.put(batch)
            self._schemas[channel.input] = batch.rows.schema

    def undo(self, channel: Channel, from_epoch: int) -> None:
        """Drop the tentative batches of a channel, from an epoch on."""
        inbox = self._inboxes[channel]
        for epoch, batch in list(inbox.batches.items()):
            if epoch >= from_epoch and batch.kind is BatchKind.TENTATIVE:
                inbox.drop(epoch)

    def has(self, channel: Channel, epoch: int) -> bool:
        return epoch in self._inboxes[channel].batches

    def is_tentative(self, channel: Channel, epoch: int) -> bool:
        """Whether what it has of the epoch is tentative."""
        batch = self._inboxes[channel].batches.get(epoch)
        return batch is not None and batch.kind is BatchKind.TENTATIVE

    def passed(self, channel: Channel, epoch: int) -> bool:
        """Whether the channel has delivered a later epoch; then it will not deliver a tentative
        version of this one."""
        return self._inboxes[channel].newest > epoch

    def buffered(self, channel: Channel) -> tuple[int, int]:
        """Epochs and bytes of memory."""
        inbox = self._inboxes[channel]
        return len(inbox.batches), inbox.bytes

    def advance(self, next_epoch: int) -> None:
        """Drop what is before the next epoch."""
        if next_epoch <= self._next_epoch:
            return
        self._next_epoch = next_epoch
        for inbox in self._inboxes.values():
            for epoch in [e for e in inbox.batches if e < next_epoch]:
                inbox.drop(epoch)

    def form(self, epoch: int, watermark: int) -> tuple[EpochInput, tuple[Channel, ...]]:
        """An epoch from the batches that have arrived, and their channels; `watermark`: of the
        branch before it. It is complete if each channel has delivered a stable batch."""
        tables: list[list[pa.Table]] = [[] for _ in self._schemas]
        present, watermarks, complete = [], [], True
        for channel, inbox in self._inboxes.items():
            batch = inbox.batches.get(epoch)
            complete &= batch is not None and batch.kind is BatchKind.STABLE
            if batch is None:
                continue
            present.append(channel)
            watermarks.append((batch.watermark, batch.idle))
            tables[channel.input].append(batch.rows)
        merged = tuple(
            merge_rows(found) if found else schema.empty_table()
            for found, schema in zip(tables, self._schemas, strict=True)
        )
        of_inputs, idle = merge_watermarks(watermarks) if present else (watermark, False)
        after = max(watermark, of_inputs)
        return EpochInput(epoch, watermark, after, merged, complete, idle), tuple(present)


def _version(batch: EpochBatch) -> tuple[bool, int]:
    return batch.kind is BatchKind.STABLE, batch.attempt
