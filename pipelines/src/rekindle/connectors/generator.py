"""The source `generator`: rows that are a pure function of (seed, row number).

Row i falls in epoch floor((i / rowsPerSecond) / Δ). Every column has a Philox counter stream of its
own, keyed by the seed and the column's name, and takes a fixed number of draws a row: any epoch is
made alone, without its predecessors. Only integer arithmetic and IEEE sums and products are used,
no log or cos, so that every processor makes the same bits (design §3). `columns` maps each column
of the schema to one of:

  sequence | sequence(start, step)   start + i·step; default 0, 1
  timestamp | timestamp(start)       start + i / rowsPerSecond; default 1970-01-01, UTC
  timestamp(start, jitter)           the same, minus a uniform part of jitter (a duration: 30s)
  integer(low, high)                 uniform, both ends included
  uniform(low, high)                 uniform double in [low, high)
  normal(mean, sd)                   sum of twelve uniforms: tails end at 6 sd
  boolean(p)                         true with probability p
  choice(a, b, ...)                  one of the constants
  cycle(a, b, ...)                   the constants in turn
  key(prefix, n)                     prefix followed by an integer in [0, n)
  constant(a)                        always a
  null(p, expression)                NULL with probability p, else the expression

The event time column has to be a `timestamp`; the watermark is the undisturbed time of the epoch's
last row, minus lateness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.connectors.cuts import SECOND_US, exact, first_row, scaled
from rekindle.connectors.expressions import Call, ExpressionError, parse_expression
from rekindle.connectors.source import SourceCut
from rekindle.errors import SourceFailed
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec, parse_duration

Uint64s = npt.NDArray[np.uint64]

_WORDS = 4  # 64-bit draws for each step of Philox's counter


@dataclass(frozen=True, slots=True)
class _Rows:
    """The row numbers first .. first + count − 1, with the column's own random draws."""

    key: int
    first: int
    count: int
    rate_num: int  # rowsPerSecond as a fraction
    rate_den: int

    def numbers(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first, self.first + self.count, dtype=np.int64)

    def draws(self, lane: str, per_row: int = 1) -> Uint64s:
        """Shape (count, per_row): the draws of these rows from the lane's own stream."""
        key = _key(self.key, lane)
        skip = self.first * per_row
        stream = np.random.Philox(key=key, counter=skip // _WORDS)
        wanted = self.count * per_row
        raw = stream.random_raw(skip % _WORDS + wanted)[skip % _WORDS :]
        return np.asarray(raw, dtype=np.uint64).reshape(self.count, per_row)

    def times(self) -> npt.NDArray[np.int64]:
        """i / rowsPerSecond in microseconds, rounded down."""
        step = self.rate_den * SECOND_US
        whole = self.first * step  # Python's integers: row numbers grow without bound
        base, rest = divmod(whole, self.rate_num)
        return base + scaled(np.arange(self.count, dtype=np.int64), step, self.rate_num, rest)


Column = Callable[[_Rows], pa.Array]


class GeneratorSource:
    """See the module. Bounded if the spec gives `rows`."""

    def __init__(self, source: SourceSpec, node: Node, epoch_interval_us: int) -> None:
        if source.generator is None:
            raise ValueError(f"source {source.name} has no generator")
        self._name = source.name
        self._spec = source.generator
        self._rate = exact(self._spec.rows_per_second)
        self._interval_us = epoch_interval_us
        self._schema = node.schema
        self._columns = _compile(source, node.schema)
        self._lateness_us = source.event_time.lateness if source.event_time else 0
        self._start_us = _event_start(source, node.event_time)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def last_epoch(self) -> int | None:
        rows = self._spec.rows
        if rows is None:
            return None
        micros = (rows - 1) * self._rate.denominator * SECOND_US
        return micros // (self._rate.numerator * self._interval_us) if rows else NO_EPOCH

    def cut(self, epoch: int) -> SourceCut:
        first, end = self._bound(epoch), self._bound(epoch + 1)
        arrays = []
        for name, column in self._columns.items():
            try:
                arrays.append(column(self._rows(name, first, end - first)))
            except (pa.ArrowException, OverflowError) as e:
                raise SourceFailed(
                    f"source {self._name}: generator.columns.{name}: "
                    f"{self._spec.columns[name]!r}: no {self._schema.field(name).type} for some "
                    f"row of epoch {epoch}: {e}"
                ) from e
        return SourceCut(pa.Table.from_arrays(arrays, schema=self._schema), self._watermark(epoch))

    def close(self) -> None:
        """Nothing is held."""

    def _bound(self, epoch: int) -> int:
        first = first_row(max(epoch, 0), self._spec.rows_per_second, self._interval_us)
        return first if self._spec.rows is None else min(first, self._spec.rows)

    def _rows(self, name: str, first: int, count: int) -> _Rows:
        key = _key(self._spec.seed, name)
        return _Rows(key, first, count, self._rate.numerator, self._rate.denominator)

    def _watermark(self, epoch: int) -> int:
        last = self.last_epoch
        if last is not None and epoch > last:
            return END_OF_INPUT
        seen = self._bound(epoch + 1)
        if self._start_us is None or not seen:
            return NO_WATERMARK
        newest = (seen - 1) * self._rate.denominator * SECOND_US // self._rate.numerator
        return self._start_us + newest - self._lateness_us


def _key(seed: int, lane: str) -> int:
    """A 128-bit key of a stream of draws."""
    digest = hashlib.blake2b(f"{seed}\0{lane}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _compile(source: SourceSpec, schema: pa.Schema) -> dict[str, Column]:
    """One function for each column of the schema, in its order. Raises SourceFailed."""
    given = source.generator.columns if source.generator else {}
    missing = [n for n in schema.names if n not in given]
    unknown = [n for n in given if n not in schema.names]
    if missing or unknown:
        what = [f"no expression for {', '.join(missing)}"] if missing else []
        what += [f"{', '.join(unknown)} not in the schema"] if unknown else []
        raise SourceFailed(f"source {source.name}: generator.columns: {'; '.join(what)}")
    columns = {}
    for field in schema:
        where = f"source {source.name}: generator.columns.{field.name}: {given[field.name]!r}"
        try:
            columns[field.name] = _column(parse_expression(given[field.name]), field.type)
        except ExpressionError as e:
            raise SourceFailed(f"{where}: {e}") from e
        except (pa.ArrowException, OverflowError) as e:
            raise SourceFailed(f"{where}: does not give a {field.type}: {e}") from e
    return columns


def _event_start(source: SourceSpec, event_time: str | None) -> int | None:
    if event_time is None or source.generator is None:
        return None
    call = parse_expression(source.generator.columns[event_time])
    if call.name != "timestamp":
        raise SourceFailed(
            f"source {source.name}: generator.columns.{event_time}: the event time has to be a "
            f"timestamp, timestamp(start) or timestamp(start, jitter), not {call.name}"
        )
    return _start_us(call)


def _column(call: Call, kind: pa.DataType) -> Column:
    """The function of a column; constants and bounds are cast here, so that errors come early."""
    match call.name:
        case "sequence":
            start, step = call.integers(0, 1)
            pa.array([start, step], pa.int64())
            pc.cast(pa.array([start]), kind)
            return lambda r: pc.cast(pa.array(start + r.numbers() * step), kind)
        case "timestamp":
            return _timestamp(call, kind)
        case "integer":
            low, high = call.integers(None, None)
            if low > high:
                raise ExpressionError(f"{low} is above {high}")
            pc.cast(pa.array([low, high]), kind)
            span = np.uint64(high - low + 1)
            return lambda r: pc.cast(
                pa.array((r.draws("")[:, 0] % span).astype(np.int64) + low), kind
            )
        case "uniform":
            left, right = call.numbers(None, None)
            _require_doubles(call, kind, left, right, left + (right - left) / 3)
            return lambda r: pc.cast(
                pa.array(left + (right - left) * _unit(r.draws(""))[:, 0]), kind
            )
        case "normal":
            mean, sd = call.numbers(None, None)
            _require_doubles(call, kind, mean - 6 * sd, mean, mean + sd / 3, mean + 6 * sd)
            return lambda r: pc.cast(pa.array(mean + sd * _bell(r)), kind)
        case "boolean":
            below = _threshold(call.numbers(None)[0])
            pc.cast(pa.array([True]), kind)
            return lambda r: pc.cast(pa.array(_below(r.draws("")[:, 0], below)), kind)
        case "choice":
            values = _constants(call, kind)
            size = np.uint64(len(values))
            return lambda r: values.take(pa.array((r.draws("")[:, 0] % size).astype(np.int64)))
        case "cycle" | "constant":
            if call.name == "constant" and len(call.arguments) != 1:
                raise ExpressionError("constant takes one value")
            turns = _constants(call, kind)
            return lambda r: turns.take(pa.array(r.numbers() % len(turns)))
        case "key":
            return _key_column(call, kind)
        case "null":
            return _null(call, kind)
    raise ExpressionError(
        f"{call.name} is not known; write sequence, timestamp, integer, uniform, normal, boolean, "
        "choice, cycle, key, constant or null"
    )


def _require_doubles(call: Call, kind: pa.DataType, *values: float) -> None:
    if pa.types.is_integer(kind):
        raise ExpressionError(
            f"{call.name} gives a DOUBLE, and the schema says {kind}; declare DOUBLE, or use "
            "integer(low, high)"
        )
    pc.cast(pa.array(values), kind)


def _timestamp(call: Call, kind: pa.DataType) -> Column:
    if not pa.types.is_timestamp(kind):
        raise ExpressionError(f"gives a TIMESTAMP, and the schema says {kind}")
    start = _start_us(call)
    jitter = 0
    if len(call.arguments) > 1:
        try:
            jitter = parse_duration(call.text(1))
        except ValueError as e:
            raise ExpressionError(str(e)) from e

    def column(rows: _Rows) -> pa.Array:
        times = start + rows.times()
        if jitter:
            times = times - (rows.draws("")[:, 0] % np.uint64(jitter)).astype(np.int64)
        return (
            pc.cast(pa.array(times), pa.timestamp("us")).cast(kind)
            if kind.tz is None
            else (pc.cast(pa.array(times), pa.timestamp("us", kind.tz)).cast(kind))
        )

    return column


def _start_us(call: Call) -> int:
    if len(call.arguments) > 2:
        raise ExpressionError("timestamp takes a start and a jitter")
    if not call.arguments:
        return 0
    try:
        micros = pc.cast(pa.array([call.text(0)]), pa.timestamp("us")).cast(pa.int64())
    except pa.ArrowInvalid as e:
        raise ExpressionError(
            f"{call.text(0)!r} is not a time in UTC; write it like 2013-01-01 06:00:00"
        ) from e
    return int(micros[0].as_py())


def _key_column(call: Call, kind: pa.DataType) -> Column:
    if len(call.arguments) != 2:
        raise ExpressionError("key takes a prefix and a number of keys")
    prefix, keys = call.text(0), call.integer(1)
    if keys < 1:
        raise ExpressionError(f"key needs at least one key, not {keys}")
    pa.array([keys], pa.uint64())
    pc.cast(pa.array([prefix]), kind)

    def column(rows: _Rows) -> pa.Array:
        numbers = pc.cast(pa.array(rows.draws("")[:, 0] % np.uint64(keys)), pa.string())
        return pc.cast(pc.binary_join_element_wise(prefix, numbers, ""), kind)

    return column


def _null(call: Call, kind: pa.DataType) -> Column:
    if len(call.arguments) != 2:
        raise ExpressionError("null takes a probability and an expression")
    below = _threshold(call.number(0))
    inner = _column(call.call(1), kind)
    nothing = pa.scalar(None, kind)
    return lambda r: pc.if_else(pa.array(_below(r.draws("null")[:, 0], below)), nothing, inner(r))


def _constants(call: Call, kind: pa.DataType) -> pa.Array:
    texts = [call.text(i) for i in range(len(call.arguments))]
    if not texts:
        raise ExpressionError(f"{call.name} needs at least one value")
    return pc.cast(pa.array(texts), kind)


def _unit(draws: Uint64s) -> npt.NDArray[np.float64]:
    """Uniform doubles in [0, 1): the upper 53 bits."""
    return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _bell(rows: _Rows) -> npt.NDArray[np.float64]:
    units = _unit(rows.draws("", per_row=12))
    total = units[:, 0].copy()
    for i in range(1, 12):
        total += units[:, i]
    return total - 6.0


def _threshold(probability: float) -> int:
    if not 0 <= probability <= 1:
        raise ExpressionError(f"{probability} is not a probability")
    return round(probability * 2**53)


def _below(draws: Uint64s, threshold: int) -> npt.NDArray[np.bool_]:
    return (draws >> np.uint64(11)) < np.uint64(threshold)
