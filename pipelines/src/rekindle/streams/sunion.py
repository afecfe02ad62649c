"""SUnion: batches from many upstream partitions in, whole epochs in one order out.

An epoch is ready when every input partition has given it; its rows are then merged in the order
(input, partition, row) and its watermark is the minimum over all of them (DPC's boundary rule), so
every replica and every replay sees the same epochs whatever the interleaving, duplication or order
of arrival. Pure: no I/O, no clock, no threads. It never waits: giving up on a missing input, and
tentative batches, are the consistency manager's and are refused here.

Design: docs/design/streams.md#sunion.
Paper: DPC (Balazinska et al. 2005), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rekindle.errors import Diverged, RekindleError
from rekindle.streams.epochs import EpochBatch, Kind


@dataclass(frozen=True, slots=True)
class Channel:
    """One partition of one input; `input` is its place in the segment's list of inputs."""

    input: int
    partition: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A channel has given a batch."""

    channel: Channel
    batch: EpochBatch


@dataclass(frozen=True, slots=True)
class Bucket:
    """One whole epoch: a table for each input, and the watermarks before and after it."""

    epoch: int
    watermark_before: int
    watermark: int
    inputs: tuple[pa.Table, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The next epochs, complete and consecutive."""

    buckets: tuple[Bucket, ...]


class TentativeRefused(RekindleError):
    """A batch that is not STABLE reached a task that takes only stable ones."""


@dataclass(slots=True)
class _Inbox:
    """What one channel has given and no ready epoch has taken."""

    batches: dict[int, EpochBatch] = field(default_factory=dict)
    bytes: int = 0


class SUnion:
    """Buckets by epoch. `channels` in merge order: by input, then by partition."""

    def __init__(
        self,
        inputs: Sequence[Sequence[int]],
        next_epoch: int,
        watermark: int,
        max_bytes: int = 256 << 20,
    ) -> None:
        """`inputs`: the partitions read, for each input; `watermark`: after `next_epoch - 1`;
        `max_bytes`: of rows held ahead, over all channels."""
        self._inputs = len(inputs)
        self._inboxes = {Channel(i, p): _Inbox() for i, ps in enumerate(inputs) for p in sorted(ps)}
        if not self._inboxes:
            raise ValueError("an SUnion without inputs never has an epoch ready")
        self.room = max_bytes // len(self._inboxes)
        """Bytes that each channel may hold ahead."""
        self.next_epoch = next_epoch
        self._watermark = watermark

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(self._inboxes)

    def has_room(self, channel: Channel) -> bool:
        """Whether the channel may be read on. A channel that lacks the next epoch always may, so
        the bound cannot stop the union."""
        inbox = self._inboxes[channel]
        return inbox.bytes < self.room or self.next_epoch not in inbox.batches

    def missing(self) -> tuple[Channel, ...]:
        """The channels that the next epoch waits for."""
        return tuple(
            c for c, inbox in self._inboxes.items() if self.next_epoch not in inbox.batches
        )

    def step(self, event: Arrived) -> list[Ready]:
        """Take a batch; a second one of the same epoch is dropped if it agrees with the first.
        Raises TentativeRefused, Diverged."""
        batch, inbox = event.batch, self._inboxes[event.channel]
        if batch.kind is not Kind.STABLE:
            raise TentativeRefused(
                f"epoch {batch.epoch} of stream {batch.stream}/{batch.partition} is {batch.kind}; "
                f"this version takes only stable epochs"
            )
        if batch.epoch < self.next_epoch:
            return []
        known = inbox.batches.get(batch.epoch)
        if known is not None:
            _agree(known, batch)
            return []
        inbox.batches[batch.epoch] = batch
        inbox.bytes += batch.rows.nbytes
        buckets = []
        while not self.missing():
            buckets.append(self._close_bucket())
        return [Ready(tuple(buckets))] if buckets else []

    def _close_bucket(self) -> Bucket:
        bucket: Mapping[Channel, EpochBatch] = {
            channel: inbox.batches.pop(self.next_epoch) for channel, inbox in self._inboxes.items()
        }
        for channel, batch in bucket.items():
            self._inboxes[channel].bytes -= batch.rows.nbytes
        before = self._watermark
        self._watermark = max(before, min(batch.watermark for batch in bucket.values()))
        tables = tuple(
            _merge([b.rows for c, b in bucket.items() if c.input == i]) for i in range(self._inputs)
        )
        self.next_epoch += 1
        return Bucket(self.next_epoch - 1, before, self._watermark, tables)


def _merge(tables: list[pa.Table]) -> pa.Table:
    rows = [table for table in tables if table.num_rows]
    return pa.concat_tables(rows) if rows else tables[0]


def _agree(known: EpochBatch, batch: EpochBatch) -> None:
    if (known.digest, known.watermark) != (batch.digest, batch.watermark):
        raise Diverged(
            f"two replicas of stream {batch.stream}/{batch.partition} disagree on epoch "
            f"{batch.epoch}: digests {known.digest} and {batch.digest}, watermarks "
            f"{known.watermark} and {batch.watermark}"
        )
