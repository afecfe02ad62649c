"""Converts columns of a file to the declared types, exactly, or names the first value that does not
fit.

`CONVERSIONS` lists which types of a file are read as which declared types; all others are refused,
since each would need a choice that only the user can make: a unit, a zone, a rounding. A value that
its type cannot hold as it is, is an error as well; none becomes NULL, Infinity or another number.
Strings inside arrays and structs are converted like columns of strings. Pure: Arrow in, Arrow out.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, auto

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.arrow_types import TIMESTAMP, arrow_to_ddl
from rekindle.errors import SchemaMismatch


@dataclass(frozen=True, slots=True)
class TextRules:
    """How strings are converted. An empty string becomes NULL, unless the target is STRING, or
    BINARY in base64."""

    binary_is_base64: bool = False
    """True for JSON; otherwise the bytes of a string are the BINARY value."""


class Kind(Enum):
    """Types between which one function converts, whatever their width, unit or precision."""

    NULL = auto()
    BOOLEAN = auto()
    INTEGER = auto()
    FLOAT = auto()
    DECIMAL = auto()
    DATE = auto()
    TIMESTAMP = auto()
    TEXT = auto()
    BYTES = auto()
    FIXED_BYTES = auto()
    LIST = auto()
    STRUCT = auto()
    OTHER = auto()


_SHOWN_CHARS = 120
_MOST_DIGITS = 38  # of a DECIMAL
_MOST_EXPONENT_DIGITS = 3
"""Of a number with 38 digits that fits a DECIMAL, unless it is 0."""
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_PARTS = r"^(?P<sign>[+-]?)0*(?P<whole>\d*)(?:\.(?P<fraction>\d*))?$"
_INFINITY = r"(?i)^[+-]?inf(inity)?$"
_NAN = r"(?i)^[+-]?nan$"
_ZERO = r"^[^1-9eE]*([eE]|$)"
_WHOLE_NUMBER = r"^[+-]?\d+$"
_OFFSET = r"(?:Z|[+-]\d{2}(?::?\d{2})?)"
_ZONED = rf"{_OFFSET}$"
_DATE_AND_TIME = r"^[+-]?\d{4,}-\d{2}-\d{2}[T ]"
_EXPANDED = re.compile(
    r"([+-]\d{4,}|\d{5,})-\d{2}-\d{2}([T ]\d{2}(:\d{2}(:\d{2}(\.\d{1,6})?)?)?Z?)?"
)
_EXPANDED_YEAR = r"^([+-]\d{4,}|\d{5,})-"
_MOST_YEAR_DIGITS = 9
_COMMON_FORMS = (  # what other programs write, and ISO 8601's own form of it
    (r"^(\d{4}-\d{2}-\d{2})t", r"\1T"),
    (r"(\d)\s*(?:UTC|z)$", r"\1Z"),
    (r"(:\d{2}(?:\.\d+)?)\s+([+-]\d{2}(?::?\d{2})?)$", r"\1\2"),
    (
        rf"(:\d{{2}}(?:\.\d+)?{_OFFSET})\[[\w/+-]+\]$",
        r"\1",
    ),  # java.time.ZonedDateTime; the offset alone decides
    (rf"(:\d{{2}}\.\d{{6}})0+({_OFFSET})?$", r"\1\2"),  # nanoseconds that are whole microseconds
)
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+\s*")
CONVERSION_FAILURES = (ValueError, pa.ArrowNotImplementedError)  # ArrowInvalid is a ValueError
"""What `convert` raises."""


def convert_to_field(
    column: pa.Array, field: pa.Field, where: str, first_row: int, rules: TextRules
) -> pa.Array:
    """The column in its declared type. Raises SchemaMismatch for the first value that does not fit;
    `first_row` is the number of rows before the column."""
    if column.type != field.type:
        try:
            column = convert(column, field.type, rules)
        except CONVERSION_FAILURES as e:
            row = first_unconvertible(column, field.type, rules) or 0
            what = describe_unconvertible(column, row, field, rules)
            raise SchemaMismatch(f"{where}, row {first_row + row + 1}: {what}") from e
    if column.null_count and not field.nullable:
        row = int(pc.index(column.is_null(), True).as_py())
        raise SchemaMismatch(f"{where}, row {first_row + row + 1}: NULL in a NOT NULL column")
    return column


def describe_unconvertible(column: pa.Array, row: int, field: pa.Field, rules: TextRules) -> str:
    """What is wrong with a value, and what to do."""
    declared, kind = arrow_to_ddl(field.type), kind_of(column.type)
    if kind is Kind.TEXT:
        text = column[row].as_py() or ""
        hint = "correct the file, the schema, or nullValue"
        has_digits = pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        if has_digits and _DECIMAL_COMMA.fullmatch(text):
            number = f"CAST(replace({_quoted(field.name)}, ',', '.') AS {declared})"
            hint = f"numbers have a decimal point: declare it STRING and write {number} in sql"
        elif kind_of(field.type) is Kind.TIMESTAMP:
            hint += "; for times of another form, declare it STRING and set eventTime.expression"
        return f"{_short(repr(text))} is not a {declared}; {hint}"
    if (kind, kind_of(field.type)) in CONVERSIONS:
        hint = "correct the file or the schema"
    else:
        hint = "declare it as what it is, and convert it in sql"
    return f"{_shown(column, row)} (in the file: {column.type}) is not a {declared}; {hint}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _quoted(name: str) -> str:
    """As SQL takes it."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name}`"


def _shown(column: pa.Array, row: int) -> str:
    """The value as text, by Arrow: Python's objects have other limits."""
    text = " ".join(column.slice(row, 1).to_string().split())
    return text.removeprefix("[").removesuffix("]").strip()[:_SHOWN_CHARS]


def first_unconvertible(column: pa.Array, target: pa.DataType, rules: TextRules) -> int | None:
    """The index of the first value that does not fit, None if all do."""
    try:
        convert(column, target, rules)
    except CONVERSION_FAILURES:
        row = _first_failing(lambda part: convert(part, target, rules), column)
        # A NULL fails only with all others of its type: one of these says more.
        return row + max(0, int(pc.index(column.slice(row).is_valid(), True).as_py()))
    return None


def convert(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Raises ValueError or ArrowNotImplementedError."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == target:
        return column
    given = kind_of(column.type)
    if given is Kind.NULL:
        return pa.nulls(len(column), target)
    conversion = CONVERSIONS.get((given, kind_of(target)))
    if conversion is None:
        raise pa.ArrowInvalid(f"{column.type} is not read as {target}")
    return conversion(column, target, rules)


def kind_of(type_: pa.DataType) -> Kind:
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return kind_of(type_.storage_type)
    if types.is_dictionary(type_):
        return kind_of(type_.value_type)
    return next(
        (kind for kind, tests in _KINDS.items() if any(t(type_) for t in tests)), Kind.OTHER
    )


_types = pa.types
_KINDS: Mapping[Kind, tuple[Callable[[pa.DataType], bool], ...]] = {
    Kind.NULL: (_types.is_null,),
    Kind.BOOLEAN: (_types.is_boolean,),
    Kind.INTEGER: (_types.is_integer,),
    Kind.FLOAT: (_types.is_floating,),
    Kind.DECIMAL: (_types.is_decimal,),
    Kind.DATE: (_types.is_date,),
    Kind.TIMESTAMP: (_types.is_timestamp,),
    Kind.TEXT: (_types.is_string, _types.is_large_string, _types.is_string_view),
    Kind.BYTES: (_types.is_binary, _types.is_large_binary, _types.is_binary_view),
    Kind.FIXED_BYTES: (_types.is_fixed_size_binary,),
    Kind.LIST: (_types.is_list, _types.is_large_list, _types.is_fixed_size_list),
    Kind.STRUCT: (_types.is_struct,),
}


def _checked(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Where Arrow's own cast refuses what it would have to change."""
    return pc.cast(column, target)


# --- numbers --------------------------------------------------------------------------------------


def _floats(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """To one of another width; Arrow would round."""
    converted = pc.cast(column, target)
    if target.bit_width < column.type.bit_width:
        back = pc.cast(converted, column.type)
        same = pc.or_(pc.equal(back, column), pc.and_(pc.is_nan(back), pc.is_nan(column)))
        _require(same, "a number is not one of its type")
    return converted


def _decimals(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """To another precision and scale. Arrow multiplies by a power of ten without a check that the
    product fits, so what has too many digits before the point is refused first."""
    scale = column.type.scale
    column = pc.cast(column, pa.decimal256(76, scale))
    digits = target.precision - target.scale + scale  # of what fits, counted at this scale
    if digits < 1:
        zero = Decimal(0)
        _require(pc.equal(column, pa.scalar(zero, column.type)), "a number has too many digits")
        null = pa.scalar(None, target)
        return pc.if_else(column.is_null(), null, pa.scalar(zero, target))
    column = pc.cast(column, pa.decimal256(min(digits, 76), scale))
    return pc.cast(column, target)


def _integers_as_decimals(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    return _decimals(pc.cast(column, pa.decimal128(20, 0)), target, rules)


def _decimals_as_integers(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    whole = _decimals(column, pa.decimal128(20, 0), rules)
    return pc.cast(whole, target)


def _require(holds: pa.Array, otherwise: str) -> None:
    """All that are not NULL."""
    if pc.all(holds, min_count=0).as_py() is False:
        raise pa.ArrowInvalid(otherwise)


# --- dates and times ------------------------------------------------------------------------------


def _timestamps(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """The same instants. A zone of the file says how people there write them, and changes nothing;
    times without a zone are in UTC."""
    instants = column.view(pa.timestamp(column.type.unit, TIMESTAMP.tz))
    return pc.cast(instants, target)


# --- nested types ---------------------------------------------------------------------------------


def _structs(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Matches fields by name, and drops those that the target does not have."""
    parts = dict(zip((f.name for f in column.type), column.flatten(), strict=True))
    missing = [f.name for f in target if f.name not in parts]
    if missing:
        raise pa.ArrowInvalid(f"no field {', '.join(missing)}")
    children = [convert(parts[f.name], f.type, rules) for f in target]
    return pa.StructArray.from_arrays(children, fields=list(target), mask=column.is_null())


def _lists(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    items = convert(column.flatten(), target.value_type, rules)
    return pa.ListArray.from_arrays(offsets, items, type=target, mask=column.is_null())


# --- texts ----------------------------------------------------------------------------------------


def _texts(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    return pc.cast(column, target)


def _text_as_bytes(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    if not rules.binary_is_base64:
        return pc.cast(_empty_as_null(column), target)
    texts = column.to_pylist()
    return pa.array(
        [None if s is None else base64.b64decode(s, validate=True) for s in texts], target
    )


def _empty_as_null(column: pa.Array) -> pa.Array:
    column = pc.cast(column, pa.large_string() if _is_large(column) else pa.string())
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)


def _is_large(column: pa.Array) -> bool:
    return bool(pa.types.is_large_string(column.type))


def _text_as_boolean(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    return pc.cast(_empty_as_null(column), target)


def _text_as_integer(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Digits alone: Arrow also reads hexadecimal ones, as two's complement, and no plus."""
    text = _empty_as_null(column)
    if _may_contain(text, b"xX+"):
        _require(pc.match_substring_regex(text, _WHOLE_NUMBER), "not a whole number")
        text = pc.utf8_ltrim(text, "+")
    return pc.cast(text, target)


def _may_contain(text: pa.Array, characters: bytes) -> bool:
    """Whether one of these is in the texts, or in others of the same buffer."""
    buffer = text.buffers()[2]
    held = b"" if buffer is None else buffer.to_pybytes()
    return any(held.find(character) >= 0 for character in characters)


def _text_as_float(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """The nearest number of the type, as every program reads it; not Infinity or 0 for one that is
    beyond the type's range."""
    text = _empty_as_null(column)
    converted = pc.cast(text, target)
    for found, form in (
        (pc.is_inf(converted), _INFINITY),
        (pc.is_nan(converted), _NAN),
        (pc.equal(converted, pa.scalar(0.0, target)), _ZERO),
    ):
        _require(pc.match_substring_regex(text.filter(found), form), "beyond what its type holds")
    return converted


def _text_as_decimal(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Digits and exponent are counted here, unless they must fit: Arrow's parser looks up any
    exponent in a table of powers of ten, and multiplies without a check that the product fits."""
    text = _empty_as_null(column)
    longest = pc.max(pc.binary_length(text)).as_py() or 0
    if longest + target.scale <= _MOST_DIGITS and not _may_contain(text, b"eE"):
        return pc.cast(text, target)
    _require(pc.match_substring_regex(text, _NUMBER), "not a number")
    exponents = pc.match_substring_regex(text, "[eE]")
    if pc.any(exponents).as_py():
        pairs = zip(text.to_pylist(), exponents.to_pylist(), strict=True)
        text = pa.array([_without_exponent(t) if e else t for t, e in pairs], text.type)
    parts = pc.extract_regex(text, _PARTS)
    whole = pc.struct_field(parts, "whole")
    fraction = pc.utf8_rtrim(pc.struct_field(parts, "fraction"), "0")
    fits = pc.and_(
        pc.less_equal(pc.utf8_length(whole), target.precision - target.scale),
        pc.less_equal(pc.utf8_length(fraction), target.scale),
    )
    _require(fits, "a number does not fit")
    sign = pc.replace_substring(pc.struct_field(parts, "sign"), "+", "")
    zero, point, nothing = (pa.scalar(t, text.type) for t in ("0", ".", ""))  # Arrow joins one type
    fraction = pc.if_else(pc.equal(fraction, ""), zero, fraction)
    digits = pc.binary_join_element_wise(sign, zero, whole, point, fraction, nothing)
    if target.scale == 0:  # no digit may be left after the point, not even 0
        digits = pc.binary_join_element_wise(sign, zero, whole, nothing)
    return pc.cast(digits, target)


def is_number(text: str) -> bool:
    """Whether it has digits, perhaps with a point and an exponent."""
    return re.fullmatch(_NUMBER, text, re.ASCII) is not None


def decimal_of(text: str, target: pa.DataType) -> Decimal:
    """The number of a text (`is_number`), as `pa.array` takes it. Raises ValueError if it does not
    fit."""
    plain = (_without_exponent(text) if "e" in text.lower() else text) or ""
    whole, _, fraction = plain.lstrip("+-").partition(".")
    digits = len(whole.lstrip("0")), len(fraction.rstrip("0"))
    if digits[0] > target.precision - target.scale or digits[1] > target.scale:
        raise ValueError(f"{text} does not fit")
    without_zeros = plain.rstrip("0").rstrip(".") if fraction else plain
    sign = "-" if plain.startswith("-") else ""
    return Decimal(sign + (without_zeros.lstrip("+-") or "0"))


def _without_exponent(text: str | None) -> str | None:
    """The same number in digits alone. Raises ValueError for one that fits no DECIMAL."""
    if text is None:
        return None
    mantissa, _, exponent = text.lower().partition("e")
    sign = mantissa[: len(mantissa) - len(mantissa.lstrip("+-"))]
    whole, _, fraction = mantissa[len(sign) :].partition(".")
    digits = whole + fraction
    if not digits.strip("0"):
        return "0"
    if len(exponent.lstrip("+-").lstrip("0")) > _MOST_EXPONENT_DIGITS:
        raise ValueError(f"{text} fits no DECIMAL")
    point = len(whole) + int(exponent)
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{digits[:point]}{'0' * (point - len(digits))}.{digits[point:]}"


def _text_as_timestamp(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """From ISO 8601 texts, and common variants of them; without a zone they are UTC."""
    text = pc.utf8_trim_whitespace(_empty_as_null(column))
    for type_ in (pa.timestamp("us"), TIMESTAMP):  # most columns have no zone, or all have one
        with contextlib.suppress(pa.ArrowInvalid):
            return _timestamps(pc.cast(text, type_), target, rules)
    for pattern, form in _COMMON_FORMS:
        text = pc.replace_substring_regex(text, pattern, form)
    zoned = pc.and_(
        pc.match_substring_regex(text, _DATE_AND_TIME), pc.match_substring_regex(text, _ZONED)
    )
    null = pa.scalar(None, text.type)
    expanded = pc.match_substring_regex(text, _EXPANDED_YEAR)
    four_digit = pc.if_else(expanded, null, text)
    with_zone = pc.cast(pc.if_else(zoned, four_digit, null), TIMESTAMP)
    without = pc.cast(pc.if_else(zoned, null, four_digit), pa.timestamp("us"))
    times = pc.coalesce(with_zone, _timestamps(without, TIMESTAMP, rules))
    if pc.any(expanded).as_py():
        texts = pc.if_else(expanded, text, null)
        times = pc.coalesce(times, _parse_expanded(texts, "us").cast(TIMESTAMP))
    return _timestamps(times, target, rules)


def _text_as_date(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    text = _empty_as_null(column)
    expanded = pc.match_substring_regex(text, _EXPANDED_YEAR)
    if not pc.any(expanded).as_py():
        return pc.cast(text, target)
    null = pa.scalar(None, text.type)
    days = _parse_expanded(pc.if_else(expanded, text, null), "D")
    return pc.coalesce(
        pc.cast(pc.if_else(expanded, null, text), target), pc.cast(days, pa.int32()).cast(target)
    )


def _parse_expanded(texts: pa.Array, unit: str) -> pa.Array:
    """Parses times in years outside 0 to 9999, as the sink writes them, to counts of `unit` since
    1970. Arrow's parser accepts only years of four digits."""
    counts: list[int | None] = []
    for text in texts.to_pylist():
        if text is None:
            counts.append(None)
            continue
        year = text.lstrip("+-").partition("-")[0]
        has_time = "T" in text or " " in text
        if (
            not _EXPANDED.fullmatch(text)
            or len(year) > _MOST_YEAR_DIGITS
            or (has_time and unit == "D")
        ):
            raise pa.ArrowInvalid(f"{text} is not ISO 8601")
        time = np.datetime64(text.removesuffix("Z"))
        count = time.astype(f"datetime64[{unit}]")
        if count.astype(time.dtype) != time or np.datetime64(str(count)) != count:
            raise pa.ArrowInvalid(f"{text} is out of range")
        counts.append(int(count.astype(np.int64)))
    return pa.array(counts, pa.int64())


Conversion = Callable[[pa.Array, pa.DataType, TextRules], pa.Array]
"""Of a column to a declared type of its kind. Raises ValueError if a value would change."""

CONVERSIONS: Mapping[tuple[Kind, Kind], Conversion] = {
    (Kind.BOOLEAN, Kind.BOOLEAN): _checked,
    (Kind.INTEGER, Kind.INTEGER): _checked,
    (Kind.INTEGER, Kind.FLOAT): _checked,
    (Kind.INTEGER, Kind.DECIMAL): _integers_as_decimals,
    (Kind.FLOAT, Kind.FLOAT): _floats,
    (Kind.FLOAT, Kind.INTEGER): _checked,
    (Kind.DECIMAL, Kind.DECIMAL): _decimals,
    (Kind.DECIMAL, Kind.INTEGER): _decimals_as_integers,
    (Kind.DATE, Kind.DATE): _checked,
    (Kind.DATE, Kind.TIMESTAMP): _checked,  # its midnight in UTC
    (Kind.TIMESTAMP, Kind.TIMESTAMP): _timestamps,
    (Kind.BYTES, Kind.BYTES): _checked,
    (Kind.BYTES, Kind.TEXT): _checked,  # if it is UTF-8: older writers do not mark texts
    (Kind.FIXED_BYTES, Kind.BYTES): _checked,
    (Kind.LIST, Kind.LIST): _lists,
    (Kind.STRUCT, Kind.STRUCT): _structs,
    (Kind.TEXT, Kind.TEXT): _texts,
    (Kind.TEXT, Kind.BYTES): _text_as_bytes,
    (Kind.TEXT, Kind.BOOLEAN): _text_as_boolean,
    (Kind.TEXT, Kind.INTEGER): _text_as_integer,
    (Kind.TEXT, Kind.FLOAT): _text_as_float,
    (Kind.TEXT, Kind.DECIMAL): _text_as_decimal,
    (Kind.TEXT, Kind.TIMESTAMP): _text_as_timestamp,
    (Kind.TEXT, Kind.DATE): _text_as_date,
}
"""All that is read: kind in the file, kind of the declared type."""


def _first_failing(convert: Callable[[pa.Array], pa.Array], column: pa.Array) -> int:
    """The index of the first value that does not convert, by binary search."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(column.slice(low, middle - low))
        except CONVERSION_FAILURES:
            high = middle
        else:
            low = middle
    return low
