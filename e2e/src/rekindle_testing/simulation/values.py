"""What a task computes in a simulation.

The state after an epoch is a hash of the partition, the state before it, all its inputs and the
watermark, and the output of an epoch is that state. So an epoch that is skipped, repeated, taken in
another order, with another watermark, from the wrong state or the wrong partition changes all that
comes after it. A value ends with "@" and the watermark after its epoch, and "~" if that is idle.

In topologies with operators that have state, tasks also run these (`chains`): a value is the name
of rows, and their digest is in the hash, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

import pyarrow as pa

from rekindle.engine.model import State
from rekindle.exchange.routing import share_read
from rekindle.exchange.shuffle import group_by_share
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochInput
from rekindle.topology.model import Partition, Segment, Topology
from rekindle_testing.simulation.chains import (
    SOURCE_SCHEMA,
    ChainOutput,
    OperatorChain,
    epochs_with,
    has_operators,
    restored,
    schema_of,
)

_MAX_ROWS, _KEYS, _NUMBERS = 4, 5, 4
_STEP_US = 250_000
_EARLIEST_STEP, _LATEST_STEP = -20, 4
"""Of event times, relative to their epoch: some are late."""
_LAG_EPOCHS = 2
"""So many epochs, or one more, the watermark of a source is behind."""
_IDLE = "~"
_IDLE_FROM, _IDLE_CYCLE = 16, 24
"""Half of the sources are idle in some epochs of each cycle."""


@dataclass(frozen=True, slots=True)
class FoldedState(State):
    """`fold`: a hash of all inputs in order."""

    fold: str = ""


def hash_of(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()


@functools.lru_cache(4096)
def rows_of(*values: str) -> pa.Table:
    """A row for each value."""
    return pa.table({"value": pa.array(values, pa.string())})


def values_in(rows: pa.Table) -> tuple[str, ...]:
    if not rows.num_rows:  # an input that has never delivered has the columns of the spec
        return ()
    return tuple(rows.column("value").to_pylist())


def watermark_of(value: str) -> int:
    """0 of the empty state."""
    return int(value.rpartition("@")[2].removesuffix(_IDLE) or 0)


def is_idle(value: str) -> bool:
    return value.endswith(_IDLE)


def with_mark(name: str, watermark: int, idle: bool) -> str:
    """A value."""
    return f"{name}@{watermark}{_IDLE if idle else ''}"


class TaskComputation:
    """What the tasks of a topology compute, and the rows that values stand for."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.has_operators = has_operators(topology)
        self._epoch_us = topology.spec.epoch_interval
        self._rows: dict[str, pa.Table] = {}
        self._chains = {
            segment.id: OperatorChain(segment, topology)
            for segment in topology.segments
            if self.has_operators and not segment.is_source
        }

    # -- sources -----------------------------------------------------------------------------------

    def source_value(self, partition: Partition, epoch: int) -> str:
        """The rows of a source in an epoch."""
        value = hash_of("source", partition.key, epoch)
        if self.has_operators and value not in self._rows:
            self._rows[value] = self._source_rows(partition, epoch)
        return value

    def source_watermark(self, partition: Partition, epoch: int) -> int:
        """After an epoch, 0 before the first one. Those of different sources drift apart, or are
        behind by different times. It stays while the source is idle."""
        number = int(hash_of(partition.key), 16)
        while self.source_is_idle(partition, epoch):
            epoch -= 1
        if self.has_operators:
            return max(0, epoch + 1 - _LAG_EPOCHS - number % 2) * self._epoch_us
        return (epoch + 1) // (1 + number % 3)

    def source_is_idle(self, partition: Partition, epoch: int) -> bool:
        number = int(hash_of(partition.key), 16)
        return epoch >= 0 and number % 2 == 1 and (epoch + number) % _IDLE_CYCLE >= _IDLE_FROM

    def _source_rows(self, partition: Partition, epoch: int) -> pa.Table:
        """Few keys, and event times of which many are a whole number of steps apart, or 1 us more
        or less."""
        random = Random(f"rows of {partition.key} {epoch}")
        columns: dict[str, list[int | None]] = {name: [] for name in SOURCE_SCHEMA.names}
        most = 0 if self.source_is_idle(partition, epoch) else _MAX_ROWS
        for number in range(random.randint(0, most)):
            step = random.randint(_EARLIEST_STEP, _LATEST_STEP)
            time = epoch * self._epoch_us + step * _STEP_US + random.choice((-1, 0, 0, 0, 1))
            row = epoch * _MAX_ROWS + number, random.randrange(_KEYS), random.randrange(_NUMBERS)
            for column, item in zip(columns.values(), (*row, time), strict=True):
                column.append(item)
            if not random.randrange(8):
                columns["k"][-1] = None
        arrays = [pa.array(column, pa.int64()) for column in columns.values()]
        return pa.table(arrays, names=SOURCE_SCHEMA.names).cast(SOURCE_SCHEMA)

    # -- tasks -------------------------------------------------------------------------------------

    def chain(self, partition: Partition) -> OperatorChain | None:
        """None of a partition without operators that have state."""
        return self._chains.get(partition.segment)

    def process(
        self, partition: Partition, state: State, epochs: Sequence[EpochInput]
    ) -> tuple[list[ChainOutput], State]:
        """What the chain of a partition makes of a call; `epochs`: with values in place of rows."""
        inputs = [self.rows_of_inputs(partition, epoch) for epoch in epochs]
        if (chain := self.chain(partition)) is not None:
            return chain.process(State(state.operators), epochs_with(epochs, inputs))
        outputs = zip(epochs, inputs, strict=True)
        return [ChainOutput(epoch.watermark, rows[0]) for epoch, rows in outputs], State()

    def value(
        self, partition: Partition, before: str, epoch: EpochInput, output: ChainOutput
    ) -> str:
        """The fold after an epoch, which stands for its output; those of no two partitions are
        equal."""
        inputs = tuple(values_in(rows) for rows in epoch.inputs)
        parts = partition.key, before, epoch.epoch, inputs, epoch.watermark
        if not self.has_operators:
            return with_mark(hash_of(*parts), output.watermark, epoch.idle)
        name = hash_of(*parts, digest_table(output.rows))
        value = with_mark(name, output.watermark, epoch.idle)
        self._rows[value] = output.rows
        return value

    def stands_for_the_same(self, value: str, other: str) -> None:
        if self.has_operators:
            self._rows[other] = self._rows[value]

    def rows(self, value: str) -> pa.Table:
        return self._rows[value]

    def rows_of_inputs(self, partition: Partition, epoch: EpochInput) -> list[pa.Table]:
        """The share of a partition of each input."""
        if not self.has_operators:
            return list(epoch.inputs)
        segment = self.topology.segment(partition.segment)
        if segment.is_source:
            return [self._rows[value] for rows in epoch.inputs for value in values_in(rows)]
        return [
            self._share(segment, partition, at, values_in(rows))
            for at, rows in enumerate(epoch.inputs)
        ]

    def _share(
        self, segment: Segment, partition: Partition, at: int, values: Sequence[str]
    ) -> pa.Table:
        entry = segment.inputs[at]
        rows = [schema_of(entry.name, self.topology).empty_table(), *map(self.rows, values)]
        table, share = (
            pa.concat_tables(rows),
            share_read(entry, segment.partitions, partition.index),
        )
        if share is None:
            return table
        return group_by_share(table, share.key_by, share.partitions)[share.index]

    def restored(self, state: FoldedState, epoch: int) -> FoldedState:
        """As it comes from a checkpoint, or from a partner."""
        if not state.operators:
            return state
        return FoldedState(restored(State(state.operators), epoch).operators, state.fold)
