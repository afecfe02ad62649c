"""Executes a whole topology in one process, one call (consecutive epochs) after another.

All segments and partitions do the same as on a cluster, with the same sources, exchange, chains and
sinks, but without replicas, logs, network and failures. So every failure test compares with its
output (I4). Memory holds a few calls and the state.

Design: docs/design/architecture.md#reference-execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rekindle.connectors.sink import Sink
from rekindle.connectors.source import ReplayableSource
from rekindle.engine.bounds import CALL_BYTES, MAX_ROWS
from rekindle.engine.model import Chain, DroppedRows, EpochOutput, State
from rekindle.errors import EpochTooLarge, RekindleError
from rekindle.exchange.routing import partitions_read, share_read
from rekindle.exchange.shuffle import group_by_share
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK, EpochBatch, EpochInput
from rekindle.topology.model import Input, Segment, Topology

QuerySinkOpener = Callable[[str, int, pa.Schema], Sink]
"""Opens the sink of a query for one partition and a schema."""

SourcePartition = tuple[str, int]
"""(name of a source, its partition)."""

Shares = dict[tuple[int, int], list[tuple[int, bool, Sequence[pa.Table]]]]
"""(index of the input, producer partition) -> for each epoch, its watermark, whether it is idle,
and the rows of each consumer partition."""


@dataclass(slots=True)
class _Partition:
    """One partition of a segment, its state and watermark after the last call."""

    chain: Chain
    sinks: Mapping[str, Sink]
    state: State = field(default_factory=State)
    watermark: int = NO_WATERMARK


@dataclass(frozen=True, slots=True)
class CallInput:
    """The input of one call of all chains: epochs that are processed together. `cuts`: by partition
    of a source, the input of each epoch. Epochs without rows that do not advance a watermark are
    left out: they would not change anything."""

    epochs: tuple[int, ...]
    cuts: Mapping[SourcePartition, tuple[EpochInput, ...]]

    @property
    def rows(self) -> int:
        """Number of rows of all sources."""
        inputs = (epoch for epochs in self.cuts.values() for epoch in epochs)
        return sum(rows.num_rows for epoch in inputs for rows in epoch.inputs)


OnRows = Callable[[str, int, pa.Table], None]
"""Called with a query, an epoch and rows of it."""


@dataclass(frozen=True, slots=True)
class _QueryOutput:
    """Output of one partition of a segment, for the sink of a query."""

    query: str
    sink: Sink
    batches: Sequence[EpochBatch]


class Execution:
    """Executes the topology. `run_call` must be called with each item of `call_inputs`, in order,
    and `write` with each of its results; the two may run in different threads."""

    def __init__(
        self,
        topology: Topology,
        make_chain: Callable[[Segment], Chain],
        open_sink: QuerySinkOpener,
        on_rows: OnRows = lambda query, epoch, rows: None,
    ) -> None:
        """Creates all chains, and opens each sink with the output schema of its chain. `on_rows` is
        called with all rows that have been written, in the order of epochs in each partition."""
        self._topology = topology
        self._on_rows = on_rows
        self._partitions: dict[tuple[str, int], _Partition] = {}
        for segment in topology.segments:
            for partition in range(segment.partitions):
                chain = make_chain(segment)
                sinks = {q: open_sink(q, partition, chain.output_schema) for q in segment.queries}
                self._partitions[segment.id, partition] = _Partition(chain, sinks)
        self.rows: dict[str, int] = {query.name: 0 for query in topology.spec.queries}
        self.epochs_with_rows = dict(self.rows)

    @property
    def dropped(self) -> dict[str, DroppedRows]:
        """By window operator: the dropped rows of all its partitions."""
        sums: dict[str, DroppedRows] = {}
        for partition in self._partitions.values():
            for operator, rows in partition.chain.dropped.items():
                total = sums.setdefault(operator, DroppedRows())
                total.late += rows.late
                total.null_event_time += rows.null_event_time
        return sums

    def run_call(self, call: CallInput) -> Sequence[_QueryOutput]:
        """Run all segments on the input of a call. Returns the output of the queries."""
        found: list[_QueryOutput] = []
        streams: dict[tuple[str, int], Sequence[EpochOutput]] = {}
        for segment in self._topology.segments:
            shares = {} if segment.is_source else _shares(segment, streams)
            for p in range(segment.partitions):
                partition = self._partitions[segment.id, p]
                if segment.is_source:
                    epochs = call.cuts[segment.nodes[0], p]
                else:
                    epochs = tuple(_merge(segment, p, shares, call.epochs, partition.watermark))
                try:
                    result = partition.chain.process(partition.state, epochs)
                except MemoryError as error:  # also Arrow's
                    span = f"epochs {epochs[0].epoch} to {epochs[-1].epoch}"
                    raise EpochTooLarge(
                        f"{', '.join(segment.nodes)}: {span} do not fit into memory ({error}); "
                        "use a machine with more, shorter epochs, or --epochs-per-job 1"
                    ) from error
                partition.state, partition.watermark = result.state, epochs[-1].watermark
                streams[segment.stream, p] = result.outputs
                found += self._query_outputs(segment, p, result.outputs)
        return found

    def write(
        self, outputs: Sequence[_QueryOutput], is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Write the output of one call. Returns early once `is_stopping` is true: the run has
        failed."""
        written: dict[str, set[int]] = {query: set() for query in self.rows}
        for output in outputs:
            for batch in output.batches:
                if is_stopping():
                    return
                if output.sink.write(batch):
                    self.rows[output.query] += batch.rows.num_rows
                    if batch.rows.num_rows:
                        written[output.query].add(batch.epoch)
                        self._on_rows(output.query, batch.epoch, batch.rows)
        for query, epochs_of_query in written.items():
            self.epochs_with_rows[query] += len(epochs_of_query)

    def _query_outputs(
        self, segment: Segment, partition: int, outputs: Sequence[EpochOutput]
    ) -> Iterator[_QueryOutput]:
        batches = [_batch(segment.stream, partition, output) for output in outputs]
        for query, sink in self._partitions[segment.id, partition].sinks.items():
            yield _QueryOutput(query, sink, batches)


def call_inputs(
    sources: Mapping[SourcePartition, ReplayableSource],
    last_epoch: int,
    epochs_per_call: int,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Iterator[CallInput]:
    """Cuts the sources into the inputs of calls, which have the same limits of rows and bytes as
    calls of a task. Epochs in which nothing changes are left out. Ends early once `is_stopping` is
    true."""
    watermarks = dict.fromkeys(sources, NO_WATERMARK)
    cuts: dict[SourcePartition, list[EpochInput]] = {
        source_partition: [] for source_partition in sources
    }
    epochs: list[int] = []
    rows = size = 0
    following = _next_epoch_to_cut(sources, 0, last_epoch)
    while following is not None and not is_stopping():
        epoch, following = following, _next_epoch_to_cut(sources, following + 1, last_epoch)
        epochs.append(epoch)
        for source_partition, source in sources.items():
            cut = source.cut(epoch)
            before = watermarks[source_partition]
            watermarks[source_partition] = max(before, cut.watermark)
            cuts[source_partition].append(
                EpochInput(epoch, before, watermarks[source_partition], (cut.rows,), idle=cut.idle)
            )
            rows += cut.rows.num_rows
            size += cut.rows.nbytes
        full = len(epochs) >= epochs_per_call or rows >= MAX_ROWS or size >= CALL_BYTES
        if following is None or full:
            yield CallInput(
                tuple(epochs),
                {source_partition: tuple(cut) for source_partition, cut in cuts.items()},
            )
            cuts = {source_partition: [] for source_partition in sources}
            epochs, rows, size = [], 0, 0


def _next_epoch_to_cut(
    sources: Mapping[SourcePartition, ReplayableSource], epoch: int, last_epoch: int
) -> int | None:
    changes = (source.next_epoch_to_cut(epoch) for source in sources.values())
    return min((c for c in changes if c is not None and c <= last_epoch), default=None)


def last_epoch_to_run(
    sources: Mapping[SourcePartition, ReplayableSource], until_epoch: int | None
) -> int:
    """The last epoch to run: the one after the last rows of every bounded source, or
    `until_epoch` if that is earlier. Raises RekindleError if a source is unbounded and
    `until_epoch` is None."""
    ends = {name: source.last_epoch for (name, _), source in sources.items()}
    bounded = [end for end in ends.values() if end is not None]
    endless = [name for name, end in ends.items() if end is None]
    if until_epoch is not None:
        end_of_input_epoch = max(bounded, default=-1) + 1
        return until_epoch if endless else min(until_epoch, end_of_input_epoch)
    if endless:
        raise RekindleError(
            f"source {', '.join(endless)} is unbounded; give --until-epoch, or set generator.rows"
        )
    return max(bounded, default=-1) + 1


def _batch(stream: str, partition: int, output: EpochOutput) -> EpochBatch:
    """The batch has no digest: nothing checks it in one process."""
    return EpochBatch(stream, partition, output.epoch, output.watermark, output.rows, "")


def _shares(segment: Segment, streams: Mapping[tuple[str, int], Sequence[EpochOutput]]) -> Shares:
    shares: Shares = {}
    for at, input in enumerate(segment.inputs):
        for producer in range(input.partitions):
            shares[at, producer] = [
                (output.watermark, output.idle, _share(input, segment.partitions, output.rows))
                for output in streams[input.stream, producer]
            ]
    return shares


def _share(input: Input, consumers: int, rows: pa.Table) -> Sequence[pa.Table]:
    share = share_read(input, consumers, consumer=0)  # of any one: only its key is used
    if share is None:
        return (rows,) * consumers
    return group_by_share(rows, share.key_by, consumers).tables()


def _merge(
    segment: Segment, partition: int, shares: Shares, epochs: Sequence[int], watermark: int
) -> Iterator[EpochInput]:
    """The epoch inputs of one call: rows in the order (input, partition, row); the watermark is the
    minimum of all channels that hold it, or the newest of the idle ones if none does. Implemented
    independently of `rekindle.streams.sunion`, whose results are compared with those of this
    execution."""
    channels = [
        (at, p) for at, i in enumerate(segment.inputs) for p in partitions_read(i, partition)
    ]
    for n, epoch in enumerate(epochs):
        parts: list[list[pa.Table]] = [[] for _ in segment.inputs]
        for channel in channels:
            input_index, _ = channel
            _, _, tables = shares[channel][n]
            parts[input_index].append(tables[partition])
        before, found = watermark, END_OF_INPUT
        of_channels = [shares[channel][n][:2] for channel in channels]
        idle = all(is_idle or of == END_OF_INPUT for of, is_idle in of_channels)
        if not idle:
            found = min(of for of, is_idle in of_channels if not is_idle)
        elif any(is_idle for _, is_idle in of_channels):
            found = max(of for of, is_idle in of_channels if is_idle)
        else:
            idle = False  # all have ended
        watermark = max(before, found)
        rows = tuple(_concat(tables) for tables in parts)
        yield EpochInput(epoch, before, watermark, rows, idle=idle)


def _concat(tables: Sequence[pa.Table]) -> pa.Table:
    filled = [table for table in tables if table.num_rows]
    return pa.concat_tables(filled) if filled else tables[0]
