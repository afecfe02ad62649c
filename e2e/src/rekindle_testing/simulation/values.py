"""What a task computes in a simulation, and what it computes in a run without faults.

The state after an epoch is a hash of the partition, the state before it, all its inputs and the
watermark, and the output of an epoch is that state. So an epoch that is skipped, repeated, taken in
another order, with another watermark, from the wrong state or the wrong partition changes all that
comes after it. A value ends with "@" and the watermark after its epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import pyarrow as pa

from rekindle.engine.model import State
from rekindle.exchange.routing import partitions_read
from rekindle.streams.epochs import NO_EPOCH, EpochInput
from rekindle.topology.model import Partition, Topology


@dataclass(frozen=True, slots=True)
class FoldedState(State):
    """`fold`: a hash of all inputs in order."""

    fold: str = ""


def hash_of(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()


@functools.lru_cache(4096)
def rows_of(text: str) -> pa.Table:
    """Rows that are told apart by a text: one row."""
    return pa.table({"value": [text]})


def values_in(rows: pa.Table) -> tuple[str, ...]:
    if not rows.num_rows:  # an input that has never delivered has the columns of the spec
        return ()
    return tuple(rows.column("value").to_pylist())


def source_value(partition: Partition, epoch: int) -> str:
    """The rows of a source in an epoch."""
    return hash_of("source", partition.key, epoch)


def source_watermark(partition: Partition, epoch: int) -> int:
    """After an epoch, 0 before the first one. Those of different sources drift apart."""
    return (epoch + 1) // (1 + int(hash_of(partition.key), 16) % 3)


def watermark_of(value: str) -> int:
    """0 of the empty state."""
    return int(value.rpartition("@")[2] or 0)


def fold_epoch(
    partition: Partition,
    before: str,
    epoch: int,
    inputs: Sequence[Sequence[str]],
    watermark: int,
) -> str:
    """The state after an epoch, and its output; those of no two partitions are equal. `inputs`: the
    values of each input, in order."""
    return f"{hash_of(partition.key, before, epoch, tuple(map(tuple, inputs)))}@{watermark}"


def fold_input(partition: Partition, before: str, epoch: EpochInput) -> str:
    inputs = [values_in(rows) for rows in epoch.inputs]
    return fold_epoch(partition, before, epoch.epoch, inputs, epoch.watermark)


class Expected:
    """The outputs of a run without faults."""

    def __init__(self, topology: Topology) -> None:
        self._reads = _reads(topology)
        self._folds: dict[Partition, list[str]] = {p: [] for p in self._reads}

    def output(self, partition: Partition, epoch: int) -> str:
        """The state after an epoch, which is its output; "" before the first one."""
        if epoch <= NO_EPOCH:
            return ""
        folds = self._folds[partition]
        while len(folds) <= epoch:
            number = len(folds)
            before = folds[-1] if folds else ""
            inputs = self._inputs(partition, number)
            watermark = self._watermark(partition, number, before)
            folds.append(fold_epoch(partition, before, number, inputs, watermark))
        return folds[epoch]

    def inputs_of(self, partition: Partition) -> list[list[Partition]]:
        """The partitions that it reads, of each input."""
        return self._reads[partition]

    def _inputs(self, partition: Partition, epoch: int) -> list[list[str]]:
        inputs = self._reads[partition]
        if not inputs:
            return [[source_value(partition, epoch)]]
        return [[self.output(p, epoch) for p in partitions] for partitions in inputs]

    def _watermark(self, partition: Partition, epoch: int, before: str) -> int:
        """The lowest of all inputs; it never falls."""
        inputs = self._reads[partition]
        if not inputs:
            return source_watermark(partition, epoch)
        read = {p for partitions in inputs for p in partitions}
        lowest = min(watermark_of(self.output(p, epoch)) for p in read)
        return max(watermark_of(before), lowest)


def _reads(topology: Topology) -> Mapping[Partition, list[list[Partition]]]:
    """For each partition the partitions that it reads, of each input."""
    found = {}
    for segment in topology.segments:
        for index in range(segment.partitions):
            found[Partition(segment.id, index)] = [
                [
                    Partition(topology.producer(entry.stream).id, i)
                    for i in sorted(partitions_read(entry, index))
                ]
                for entry in segment.inputs
            ]
    return found
