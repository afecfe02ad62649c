"""The source `generator`: rows that are a pure function of (seed, row number).

Row i is in epoch floor((i / rowsPerSecond) / Δ). Every column has its own stream of the
counter-based generator Philox, keyed by the seed and the column's name, and uses a fixed number of
random numbers for each row: any epoch is computed without its predecessors. Only integer arithmetic
and IEEE sums and products are used, not log or cos, so that every processor gets the same bits.
`columns` maps each column of the schema to an expression of `rekindle.topology.generator.columns`,
which `rekindle.connectors.generator_columns` computes.

The expression of the event time column has to be `timestamp(...)`; the watermark is the time of the
epoch's last row, before jitter, minus lateness.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rekindle.arrow_types import arrow_schema, arrow_type
from rekindle.connectors.cuts import INT64_MAX, SECOND_US, exact_fraction, first_row, scaled
from rekindle.connectors.generator_columns import (
    ColumnFunction,
    Int64s,
    Uint64s,
    column_function,
)
from rekindle.connectors.input_identity import InputFile
from rekindle.connectors.source import EventTimes, SourceContext, SourceCut, SourceSummary
from rekindle.engine.call_sizes import check_size
from rekindle.errors import SourceFailed
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK
from rekindle.topology.generator.columns import event_start, parse_column
from rekindle.topology.generator.expressions import ExpressionError
from rekindle.topology.kinds.generator import GeneratorSourceSpec
from rekindle.topology.schema import Schema

SAMPLE_ROWS = 1_000
"""Number of rows that are computed first, to estimate the size of an epoch."""
_NUMBERS_PER_STEP = 4  # 64-bit random numbers for each step of Philox's counter


@dataclass(frozen=True, slots=True)
class _Rows:
    """The row numbers first .. first + count − 1, with the column's own random numbers."""

    key: int
    first: int
    count: int
    rate_num: int  # rowsPerSecond as a fraction
    rate_den: int

    def numbers(self) -> Int64s:
        return np.arange(self.first, self.first + self.count, dtype=np.int64)

    def draws(self, label: str, per_row: int = 1) -> Uint64s:
        """Shape (count, per_row): random numbers of these rows, from the independent random stream
        `label`."""
        key = _key(self.key, label)
        steps, skipped = divmod(self.first * per_row, _NUMBERS_PER_STEP)
        stream = np.random.Philox(key=key, counter=steps)
        raw = stream.random_raw(skipped + self.count * per_row)[skipped:]
        return np.asarray(raw, dtype=np.uint64).reshape(self.count, per_row)

    def times(self) -> Int64s:
        """i / rowsPerSecond in microseconds, rounded down."""
        step = self.rate_den * SECOND_US
        whole = self.first * step  # Python's integers: row numbers are unbounded
        if (whole + max(self.count - 1, 0) * step) // self.rate_num > INT64_MAX:
            raise OverflowError("outside the range of TIMESTAMP")
        base, rest = divmod(whole, self.rate_num)
        return base + scaled(np.arange(self.count, dtype=np.int64), step, self.rate_num, rest)


def open_source(options: GeneratorSourceSpec, context: SourceContext) -> GeneratorSource:
    """See `rekindle.connectors.source.OpenSource`."""
    return GeneratorSource(options, context)


class GeneratorSource:
    """Implements `rekindle.connectors.source.ReplayableSource`. Bounded if the spec has `rows`."""

    input_files: tuple[InputFile, ...] = ()

    def __init__(self, options: GeneratorSourceSpec, context: SourceContext) -> None:
        source, node = context.spec, context.node
        self._memory = context.memory
        self._sampled = False
        self._name = source.name
        self._spec = options
        self._rate = exact_fraction(options.rows_per_second)
        self._epoch_interval_us = context.epoch_interval_us
        self._schema = arrow_schema(node.schema)
        self._columns = _compile(source.name, options, node.schema)
        self._lateness_us = source.event_time.lateness if source.event_time else 0
        self._start_us = _event_start(source.name, options, node.event_time)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def last_epoch(self) -> int | None:
        rows = self._spec.rows
        if rows is None:
            return None
        micros = (rows - 1) * self._rate.denominator * SECOND_US
        return micros // (self._rate.numerator * self._epoch_interval_us) if rows else NO_EPOCH

    @property
    def summary(self) -> SourceSummary:
        """The times are those without jitter."""
        rows, first_us = self._spec.rows, self._start_us
        if rows is None or first_us is None:
            return SourceSummary(rows, first_us, None)
        last_us = first_us + (rows - 1) * self._rate.denominator * SECOND_US // self._rate.numerator
        return SourceSummary(rows, first_us, min(last_us, INT64_MAX))

    def cut(self, epoch: int) -> SourceCut:
        first, end = self._first_row_of(epoch), self._first_row_of(epoch + 1)
        if self._memory is not None and not self._sampled and end - first > SAMPLE_ROWS:
            size = self._make(epoch, first, SAMPLE_ROWS).nbytes * (end - first) // SAMPLE_ROWS
            check_size(
                f"source {self._name}: epoch {epoch} ({end - first:,} rows)", size, self._memory
            )
            self._sampled = True  # later epochs have the same size
        return SourceCut(self._make(epoch, first, end - first), self._watermark(epoch))

    def _make(self, epoch: int, first: int, count: int) -> pa.Table:
        """`count` rows of `epoch` from row number `first`. Raises SourceFailed."""
        arrays = []
        for name, column in self._columns.items():
            try:
                arrays.append(column(self._rows(name, first, count)))
            except (pa.ArrowException, OverflowError) as e:
                raise SourceFailed(
                    f"source {self._name}: generator.columns.{name}: "
                    f"{self._spec.columns[name]!r}: no {self._schema.field(name).type} value for "
                    f"some row of epoch {epoch}: {e}"
                ) from e
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def next_epoch_to_cut(self, epoch: int) -> int | None:
        """The watermark advances with each row, and at the end."""
        first, last = self._first_row_of(epoch), self.last_epoch
        if last is not None and epoch > last:
            return last + 1 if epoch == last + 1 else None
        return (
            first
            * self._rate.denominator
            * SECOND_US
            // (self._rate.numerator * self._epoch_interval_us)
        )

    def close(self) -> None:
        """There is nothing to close."""

    def _first_row_of(self, epoch: int) -> int:
        """The number of the epoch's first row; after the end, the number of rows."""
        first = first_row(max(epoch, 0), self._spec.rows_per_second, self._epoch_interval_us)
        return first if self._spec.rows is None else min(first, self._spec.rows)

    def _rows(self, name: str, first: int, count: int) -> _Rows:
        key = _key(self._spec.seed, name)
        return _Rows(key, first, count, self._rate.numerator, self._rate.denominator)

    def event_times(self, epoch: int) -> EventTimes:
        """The newest event time is that without jitter, which is not before it."""
        return EventTimes(self._newest_us(epoch), self._watermark(epoch))

    def _watermark(self, epoch: int) -> int:
        last = self.last_epoch
        if last is not None and epoch > last:
            return END_OF_INPUT
        return max(self._newest_us(epoch) - self._lateness_us, NO_WATERMARK)

    def _newest_us(self, epoch: int) -> int:
        seen = self._first_row_of(epoch + 1)
        if self._start_us is None or not seen:
            return NO_WATERMARK
        newest = (seen - 1) * self._rate.denominator * SECOND_US // self._rate.numerator
        return self._start_us + newest


def _key(seed: int, label: str) -> int:
    """The 128-bit key of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}\0{label}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _compile(name: str, options: GeneratorSourceSpec, schema: Schema) -> dict[str, ColumnFunction]:
    """One function for each column of the schema, in its order. Raises SourceFailed."""
    given = options.columns
    missing = [n for n in schema.names if n not in given]
    unknown = [n for n in given if n not in schema.names]
    if missing or unknown:
        what = [f"no expression for {', '.join(missing)}"] if missing else []
        what += [f"{', '.join(unknown)} not in the schema"] if unknown else []
        raise SourceFailed(f"source {name}: generator.columns: {'; '.join(what)}")
    columns = {}
    for field in schema:
        try:
            column = parse_column(given[field.name], field.type)
            columns[field.name] = column_function(column, arrow_type(field.type))
        except ExpressionError as e:
            where = f"source {name}: generator.columns.{field.name}"
            raise SourceFailed(f"{where}: {given[field.name]!r}: {e}") from e
    return columns


def _event_start(name: str, options: GeneratorSourceSpec, event_time: str | None) -> int | None:
    if event_time is None:
        return None
    try:
        return event_start(options.columns[event_time])
    except ExpressionError as e:
        where = f"source {name}: generator.columns.{event_time}"
        raise SourceFailed(f"{where}: {e}") from e
