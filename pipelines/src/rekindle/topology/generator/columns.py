"""Compiles expressions of the generator: a column's text becomes a function of its rows.

Validation compiles the functions without calling them; `rekindle.connectors.generator_source` calls
the same functions with row numbers, times and random numbers (draws). No randomness in here. Every
function takes a fixed number of draws for each row and computes with integers and IEEE sums and
products only, no log or cos, so that every processor computes the same bits. The language:

  sequence | sequence(start, step)   start + i·step; default 0, 1
  timestamp | timestamp(start)       start + i / rowsPerSecond; default 1970-01-01, UTC
  timestamp(start, jitter)           the same, minus a uniform random part of jitter (30s)
  integer(low, high)                 uniform, both ends included
  uniform(low, high)                 uniform double in [low, high)
  normal(mean, sd)                   sum of twelve uniforms: tails end at 6 sd
  boolean(p)                         true with probability p
  choice(a, b, ...)                  one of the constants
  cycle(a, b, ...)                   the constants one after another
  key(prefix, n)                     prefix followed by an integer in [0, n)
  constant(a)                        always a
  null(p, expression)                NULL with probability p, else the expression

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.topology.generator.expressions import Call, ExpressionError, parse_expression
from rekindle.topology.problems import did_you_mean
from rekindle.topology.sql.ddl import arrow_to_ddl
from rekindle.topology.units import parse_duration

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

_NAMES = (
    "sequence",
    "timestamp",
    "integer",
    "uniform",
    "normal",
    "boolean",
    "choice",
    "cycle",
    "key",
    "constant",
    "null",
)


class Rows(Protocol):
    """Consecutive rows of one column, with the column's own random draws."""

    def numbers(self) -> Int64s:
        """Their row numbers."""

    def draws(self, label: str, per_row: int = 1) -> Uint64s:
        """Shape (rows, per_row): their draws from the independent random stream `label`."""

    def times(self) -> Int64s:
        """Row number / rowsPerSecond in microseconds, rounded down."""


Column = Callable[[Rows], pa.Array]


def make_column(text: str, kind: pa.DataType) -> Column:
    """The function of a column of type `kind`. Raises ExpressionError."""
    try:
        return _column(parse_expression(text), kind)
    except ExpressionError as error:
        raise ExpressionError(str(error), error.hint or suitable(kind)) from error
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise ExpressionError(f"does not give {arrow_to_ddl(kind)}", suitable(kind)) from error


def event_start(text: str) -> int:
    """Where the event times of a column begin, in microseconds. Raises ExpressionError."""
    call = parse_expression(text)
    if call.name != "timestamp":
        raise ExpressionError(
            "the event time has to be a timestamp, timestamp(start) or timestamp(start, jitter), "
            f"not {call.name}"
        )
    return _start_us(call)


def suitable(kind: pa.DataType) -> str:
    """A hint with expressions of a type."""
    if pa.types.is_nested(kind):
        return "the generator has no arrays and structs; build them with a sql operator"
    if pa.types.is_integer(kind):
        return "write e.g. sequence or integer(1, 6)"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "write e.g. uniform(0, 100) or normal(12, 30)"
    if pa.types.is_timestamp(kind):
        return "write e.g. timestamp or timestamp(2013-01-01 00:00:00, 30s)"
    if pa.types.is_boolean(kind):
        return "write e.g. boolean(0.5)"
    if pa.types.is_date(kind):
        return "write e.g. choice(2013-01-01, 2013-01-02)"
    return "write e.g. choice(a, b) or key(user-, 100)"


def _column(call: Call, kind: pa.DataType) -> Column:
    """The function of a column. Constants and bounds are cast here, so that errors are found
    early."""
    match call.name:
        case "sequence":
            start, step = call.integers(0, 1)
            _require_number(call, kind)
            pa.array([start, step], pa.int64())
            pc.cast(pa.array([start]), kind)
            return lambda r: pc.cast(pa.array(start + r.numbers() * step), kind)
        case "timestamp":
            return _timestamp(call, kind)
        case "integer":
            low, high = call.integers(None, None)
            if low > high:
                raise ExpressionError(f"{low} is above {high}")
            _require_number(call, kind)
            pc.cast(pa.array([low, high], pa.int64()), kind)
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
            return lambda r: pc.cast(pa.array(mean + sd * _normal(r)), kind)
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
    known = f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}"
    hint = did_you_mean(call.name, _NAMES)
    raise ExpressionError(f"unknown function {call.name}; write {known}", hint)


def _require_number(call: Call, kind: pa.DataType) -> None:
    """Arrow would accept an integer as a time or a boolean, which is hardly intended."""
    if pa.types.is_temporal(kind) or pa.types.is_boolean(kind):
        raise ExpressionError(f"{call.name} gives BIGINT, and the schema has {arrow_to_ddl(kind)}")


def _require_doubles(call: Call, kind: pa.DataType, *values: float) -> None:
    if pa.types.is_integer(kind):
        raise ExpressionError(
            f"{call.name} gives DOUBLE, and the schema has {arrow_to_ddl(kind)}",
            "declare DOUBLE, or write integer(low, high)",
        )
    pc.cast(pa.array(values), kind)


def _timestamp(call: Call, kind: pa.DataType) -> Column:
    if not pa.types.is_timestamp(kind):
        raise ExpressionError(f"gives TIMESTAMP, and the schema has {arrow_to_ddl(kind)}")
    start = _start_us(call)
    jitter = 0
    if len(call.arguments) > 1:
        try:
            jitter = parse_duration(call.text(1))
            np.uint64(jitter)
        except ValueError as e:
            raise ExpressionError(str(e)) from e

    def column(rows: Rows) -> pa.Array:
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

    def column(rows: Rows) -> pa.Array:
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


def _normal(rows: Rows) -> npt.NDArray[np.float64]:
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
