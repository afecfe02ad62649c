"""Epochs: the batches that flow between segments, and the inputs of a segment's chain.

An epoch number is at the same time DPC's boundary tuple, the punctuation of progressive recovery,
the checkpoint alignment and Flux's sequence number. This module is pure: no I/O, no clock.

Design: docs/design/epochs.md.
Papers: DPC (Balazinska et al. 2005), section 3.2; Flux (Shah et al. 2004), section 3.1.2;
progressive recovery (Su and Zhou 2017), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import pyarrow as pa

from rekindle.table_memory import memory_bytes

NO_WATERMARK = -(2**63)
"""Watermark before any row was seen, microseconds."""

END_OF_INPUT = 2**63 - 1
"""Watermark of a bounded source after its last row: every window closes."""

NO_EPOCH = -1
"""The epoch before the first one: "nothing yet"."""


def last_of_group(epoch: int, epochs_per_commit: int) -> int:
    """The last epoch of the group that has `epoch`, where a sink makes so many epochs durable at
    once. Each checkpoint epoch ends a group, if their number divides that of the interval."""
    return epoch - epoch % epochs_per_commit + epochs_per_commit - 1


def merge_watermarks(inputs: Iterable[tuple[int, bool]]) -> tuple[int, bool]:
    """The watermark of several inputs, and whether all of them are idle. `inputs`: watermark of
    each, and whether it is idle; at least one.

    An input that is idle, or has ended, holds the watermark back no longer. If no input does, the
    newest watermark of the idle ones counts, so that it does not matter which became idle first."""
    known = tuple(inputs)
    holding = [watermark for watermark, idle in known if not idle and watermark != END_OF_INPUT]
    if holding:
        return min(holding), False
    of_idle = [watermark for watermark, idle in known if idle]
    return (max(of_idle), True) if of_idle else (END_OF_INPUT, False)


class BatchKind(StrEnum):
    """The kind of a batch (DPC); only STABLE ones are acknowledged, checkpointed and digested."""

    STABLE = "STABLE"
    TENTATIVE = "TENTATIVE"
    UNDO = "UNDO"  # drop the tentative epochs from its own on
    RECONCILIATION_DONE = "REC_DONE"  # as DPC calls it: all corrections are sent


@dataclass(frozen=True)
class EpochBatch:
    """One epoch of one partition of one stream.

    `watermark` is in microseconds since the Unix epoch, UTC: after this epoch no row with an older
    event time is expected. `rows` may be empty: then the batch only says that the epoch has ended.
    `digest` is the canonical digest of the rows (`rekindle.streams.digest`), hex. `attempt`: the
    number of the tentative branch; 0 for stable ones. `idle`: nothing is expected before something
    happens at the sources, so the watermark holds back no consumer (`merge_watermarks`).
    """

    stream: str
    partition: int
    epoch: int
    watermark: int
    rows: pa.Table
    digest: str
    kind: BatchKind = BatchKind.STABLE
    attempt: int = 0
    idle: bool = False

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes of memory, about. Cached: each buffer adds it, and subtracts it again."""
        return memory_bytes(self.rows)


@dataclass(frozen=True, slots=True)
class Result:
    """What identifies the content of an epoch."""

    digest: str
    watermark: int
    idle: bool = False

    @staticmethod
    def of(batch: EpochBatch) -> Result:
        return Result(batch.digest, batch.watermark, batch.idle)

    def __str__(self) -> str:
        idle = ", idle" if self.idle else ""
        return f"digest {self.digest} and watermark {self.watermark}{idle}"


@dataclass(frozen=True)
class EpochInput:
    """One epoch of a chain's inputs, merged in the order (input, partition, row).

    `inputs` has one table for each input of the segment, in the order of the spec (for a source
    segment: one, the source's rows). `watermark_before` is the chain's watermark after the
    preceding epoch; a row is late for a window iff window_end <= watermark_before. A window closes
    in the first epoch with window_end <= watermark. Microseconds UTC. `complete`: False if rows of
    an input may be missing, which only an epoch of a tentative branch lacks. `idle`: all inputs
    are (`merge_watermarks`), and so is the chain's output.
    """

    epoch: int
    watermark_before: int
    watermark: int
    inputs: tuple[pa.Table, ...]
    complete: bool = True
    idle: bool = False

    @cached_property
    def num_rows(self) -> int:
        return sum(int(table.num_rows) for table in self.inputs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the rows; of a slice only its part. Cached, because Arrow counts at each
        call."""
        return sum(int(table.nbytes) for table in self.inputs)

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes of memory, about: the rows, and the objects around them."""
        return sum(map(memory_bytes, self.inputs))
