"""Parses expressions of the generator: a column's text becomes a typed description of its values.

Validation parses them; `rekindle.connectors.generator_columns` computes the values from row
numbers, times and random numbers (draws). Pure: text and type in, a description out. The language,
where i is the number of a row:

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

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rekindle.topology.generator.constants import Value, constant, time_us
from rekindle.topology.generator.expressions import ExpressionError, GeneratorCall, parse_expression
from rekindle.topology.problems import did_you_mean
from rekindle.topology.schema import (
    INTEGER_BITS,
    DataType,
    Decimal,
    Scalar,
    is_floating,
    is_integer,
    is_nested,
    type_to_ddl,
)
from rekindle.topology.units import parse_duration

_FUNCTIONS = (
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
_UINT64_END = 2**64
_EXACT_INTEGERS = {Scalar.DOUBLE: 2**53, Scalar.FLOAT: 2**24}
"""By floating type: it represents all integers up to this one exactly."""
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
_BIGINT_DIGITS = 19
_TYPES_OF_BOOLEANS = (Scalar.BOOLEAN, Scalar.STRING, *INTEGER_BITS, *_EXACT_INTEGERS)


@dataclass(frozen=True, slots=True)
class SequenceColumn:
    start: int
    step: int


@dataclass(frozen=True, slots=True)
class Timestamps:
    start_us: int
    jitter_us: int


@dataclass(frozen=True, slots=True)
class Integers:
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Normal:
    mean: float
    sd: float


@dataclass(frozen=True, slots=True)
class Booleans:
    """`threshold`: the probability of true, in units of 2⁻⁵³."""

    threshold: int


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Cycle:
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Keys:
    prefix: str
    count: int


@dataclass(frozen=True, slots=True)
class OrNull:
    """`threshold`: the probability of NULL, in units of 2⁻⁵³."""

    threshold: int
    column: Column


Column = (
    SequenceColumn
    | Timestamps
    | Integers
    | Uniform
    | Normal
    | Booleans
    | Choice
    | Cycle
    | Keys
    | OrNull
)


def parse_column(text: str, data_type: DataType | None) -> Column:
    """The description of a column of type `data_type`, or of unknown type (None). Raises
    ExpressionError."""
    try:
        return _column(parse_expression(text), data_type)
    except ExpressionError as error:
        raise ExpressionError(str(error), error.hint or expression_hint(data_type)) from error
    except (OverflowError, ValueError) as error:
        what = f"does not give {type_to_ddl(data_type)}"
        raise ExpressionError(what, expression_hint(data_type)) from error


def event_start(text: str) -> int:
    """The time at which the event times of a column begin, in microseconds since 1970. Raises
    ExpressionError."""
    call = parse_expression(text)
    if call.name != "timestamp":
        raise ExpressionError(
            "the event time has to be a timestamp, timestamp(start) or timestamp(start, jitter), "
            f"not {call.name}"
        )
    return _start_us(call)


def expression_hint(data_type: DataType | None) -> str:
    """A hint with expressions of a type."""
    if is_nested(data_type):
        return "the generator has no arrays and structs; build them with a sql operator"
    if is_integer(data_type):
        return "write e.g. sequence or integer(1, 6)"
    if is_floating(data_type) or isinstance(data_type, Decimal):
        return "write e.g. uniform(0, 100) or normal(12, 30)"
    if data_type is Scalar.TIMESTAMP:
        return "write e.g. timestamp or timestamp(2013-01-01 00:00:00, 30s)"
    if data_type is Scalar.BOOLEAN:
        return "write e.g. boolean(0.5)"
    if data_type is Scalar.DATE:
        return "write e.g. choice(2013-01-01, 2013-01-02)"
    return "write e.g. choice(a, b) or key(user-, 100)"


def _column(call: GeneratorCall, data_type: DataType | None) -> Column:
    """The description of a column. Constants and bounds are checked here, so that errors are found
    early. Raises ExpressionError, and ValueError or OverflowError for values of another type."""
    match call.name:
        case "sequence":
            start, step = call.integers(0, 1)
            _require_number(call, data_type)
            _require_bigints(start, step)
            _require_integer_of(data_type, start)
            return SequenceColumn(start, step)
        case "timestamp":
            return _timestamps(call, data_type)
        case "integer":
            low, high = call.integers(None, None)
            if low > high:
                raise ExpressionError(f"{low} is above {high}")
            _require_number(call, data_type)
            _require_bigints(low, high)
            _require_integer_of(data_type, low)
            _require_integer_of(data_type, high)
            _require_uint64(high - low + 1)
            return Integers(low, high)
        case "uniform":
            left, right = call.numbers(None, None)
            if left > right:
                raise ExpressionError(f"{left:g} is above {right:g}")
            _require_doubles(call, data_type, left, right, left + (right - left) / 3)
            return Uniform(left, right)
        case "normal":
            mean, sd = call.numbers(None, None)
            _require_doubles(call, data_type, mean - 6 * sd, mean, mean + sd / 3, mean + 6 * sd)
            return Normal(mean, sd)
        case "boolean":
            threshold = _threshold(call.numbers(None)[0])
            if data_type not in _TYPES_OF_BOOLEANS:
                raise ValueError("true is not a value of this type")
            return Booleans(threshold)
        case "choice":
            return Choice(_constants(call, data_type))
        case "cycle" | "constant":
            if call.name == "constant" and len(call.arguments) != 1:
                raise ExpressionError("constant takes one value")
            return Cycle(_constants(call, data_type))
        case "key":
            return _keys(call, data_type)
        case "null":
            if len(call.arguments) != 2:
                raise ExpressionError("null takes a probability and an expression")
            return OrNull(_threshold(call.number(0)), _column(call.call(1), data_type))
    known = f"{', '.join(_FUNCTIONS[:-1])} or {_FUNCTIONS[-1]}"
    hint = did_you_mean(call.name, _FUNCTIONS)
    raise ExpressionError(f"unknown function {call.name}; write {known}", hint)


def _require_number(call: GeneratorCall, data_type: DataType | None) -> None:
    if data_type in (Scalar.TIMESTAMP, Scalar.DATE, Scalar.BOOLEAN):
        found = type_to_ddl(data_type)
        raise ExpressionError(f"{call.name} gives BIGINT, and the schema has {found}")


def _require_bigints(*numbers: int) -> None:
    if any(not -(2**63) <= number < 2**63 for number in numbers):
        raise ValueError("outside the range of BIGINT")


def _require_uint64(number: int) -> None:
    if number >= _UINT64_END:
        raise ValueError("outside the range of 64-bit numbers")


def _require_integer_of(data_type: DataType | None, number: int) -> None:
    """Check that the type can represent `number` exactly; a DECIMAL, that it can represent any
    BIGINT."""
    match data_type:
        case Scalar.STRING:
            return
        case Scalar.BIGINT | Scalar.INT | Scalar.SMALLINT | Scalar.TINYINT:
            end = 1 << (INTEGER_BITS[data_type] - 1)
            fits = -end <= number < end
        case Scalar.DOUBLE | Scalar.FLOAT:
            fits = abs(number) <= _EXACT_INTEGERS[data_type]
        case Decimal(precision, scale):
            fits = precision - scale >= _BIGINT_DIGITS
        case _:
            fits = False
    if not fits:
        raise ValueError(f"{number} is not a value of this type")


def _require_doubles(call: GeneratorCall, data_type: DataType | None, *values: float) -> None:
    if is_integer(data_type):
        raise ExpressionError(
            f"{call.name} gives DOUBLE, and the schema has {type_to_ddl(data_type)}",
            "declare DOUBLE, or write integer(low, high)",
        )
    match data_type:
        case Scalar.FLOAT:
            fits = all(abs(value) <= _LARGEST_FLOAT for value in values)
        case Scalar.DOUBLE | Scalar.STRING | Scalar.BOOLEAN:
            fits = all(map(math.isfinite, values))
        case Decimal(precision, scale):
            scaled = [round(Fraction(value) * 10**scale) for value in values]
            fits = all(abs(number) < 10**precision for number in scaled)
        case _:
            fits = False
    if not fits:
        raise ValueError("a DOUBLE is not a value of this type")


def _timestamps(call: GeneratorCall, data_type: DataType | None) -> Timestamps:
    if data_type is not Scalar.TIMESTAMP:
        raise ExpressionError(f"gives TIMESTAMP, and the schema has {type_to_ddl(data_type)}")
    start = _start_us(call)
    jitter = 0
    if len(call.arguments) > 1:
        text = call.text(1)
        try:
            jitter = parse_duration(text)
        except ValueError as e:
            raise ExpressionError(str(e)) from e
        _require_bigints(jitter)
    return Timestamps(start, jitter)


def _start_us(call: GeneratorCall) -> int:
    if len(call.arguments) > 2:
        raise ExpressionError("timestamp takes a start and a jitter")
    if not call.arguments:
        return 0
    text = call.text(0)
    try:
        return time_us(text, zoned=False)
    except ValueError as e:
        raise ExpressionError(
            f"{text!r} is not a time in UTC; write it like 2013-01-01 06:00:00"
        ) from e


def _keys(call: GeneratorCall, data_type: DataType | None) -> Keys:
    if len(call.arguments) != 2:
        raise ExpressionError("key takes a prefix and a number of keys")
    prefix, keys = call.text(0), call.integer(1)
    if keys < 1:
        raise ExpressionError(f"key needs at least one key, not {keys}")
    _require_uint64(keys)
    constant(prefix, data_type)
    return Keys(prefix, keys)


def _constants(call: GeneratorCall, data_type: DataType | None) -> tuple[Value, ...]:
    texts = [call.text(i) for i in range(len(call.arguments))]
    if not texts:
        raise ExpressionError(f"{call.name} needs at least one value")
    return tuple(constant(text, data_type) for text in texts)


def _threshold(probability: float) -> int:
    if not 0 <= probability <= 1:
        raise ExpressionError(f"{probability} is not a probability")
    return round(probability * 2**53)
