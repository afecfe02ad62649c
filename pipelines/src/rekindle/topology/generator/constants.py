"""Constants in expressions of the generator: a text becomes a value of the column's type.

Numbers, dates and times have the forms that Arrow casts from text. An integer may be hexadecimal
(`0xFF`), the bits of its type. A DECIMAL must not lose digits.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re

from rekindle.topology.schema import INTEGER_BITS, DataType, Decimal, Scalar

Value = str | bytes | bool | int | float | decimal.Decimal

MAX_DIGITS = 38
"""The largest precision of a DECIMAL."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile(r"-?\d+|0[xX](?P<hex>[0-9a-fA-F]+)", re.ASCII)
_REAL = re.compile(
    r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity|nan(\(\w*\))?))", re.ASCII
)
_DECIMAL = re.compile(
    r"(?P<sign>[+-]?)(?=\.?\d)(?P<whole>\d*)(\.(?P<fraction>\d*))?([eE](?P<exponent>[+-]?\d+))?",
    re.ASCII,
)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)"
    r"([ T](?P<hour>\d\d)(:(?P<minute>\d\d)(:(?P<second>\d\d)(\.(?P<fraction>\d{1,6}))?)?)?"
    r"(?P<zone>Z|(?P<sign>[+-])(?P<zone_hour>\d\d)(:?(?P<zone_minute>\d\d))?)?)?",
    re.ASCII,
)
_DAYS_OF_400_YEARS = 146_097
_DAY_OF_1970 = dt.date(1970, 1, 1).toordinal()


def constant(text: str, data_type: DataType | None) -> Value:
    """The value; a DATE is in days, a TIMESTAMP in microseconds since 1970, UTC. Raises ValueError,
    also if `data_type` is None because the type of the column is not known."""
    match data_type:
        case Scalar.STRING:
            text.encode()  # half of a surrogate pair is not valid text
            return text
        case Scalar.BINARY:
            return text.encode()
        case Scalar.BOOLEAN if text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        case Scalar.BIGINT | Scalar.INT | Scalar.SMALLINT | Scalar.TINYINT:
            return _integer(text, INTEGER_BITS[data_type])
        case Scalar.DOUBLE | Scalar.FLOAT if _REAL.fullmatch(text):
            return float(text.partition("(")[0])
        case Scalar.DATE:
            return _days(text)
        case Scalar.TIMESTAMP:
            return time_us(text, zoned=True)
        case Decimal(precision, scale):
            return _decimal(text, precision, scale)
        case _:
            raise ValueError(f"{text!r} is not a value of this type")


def time_us(text: str, *, zoned: bool) -> int:
    """Microseconds since 1970 of a time with an offset from UTC (`zoned`), or of one in UTC without
    it. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None or (match["zone"] is not None) != zoned:
        raise ValueError(f"{text!r} is not a time")
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    clock = dt.time(hour, minute, second)
    offset = dt.time(int(match["zone_hour"] or 0), int(match["zone_minute"] or 0))
    offset_min = (offset.hour * 60 + offset.minute) * (-1 if match["sign"] == "-" else 1)
    minutes = (_days(match["date"]) * 24 + clock.hour) * 60 + clock.minute - offset_min
    return (minutes * 60 + clock.second) * 1_000_000 + int((match["fraction"] or "").ljust(6, "0"))


def _days(text: str) -> int:
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a date")
    year, month, day = map(int, match.groups())
    if year == 0:  # Python's dates begin with the year 1
        return dt.date(400, month, day).toordinal() - _DAYS_OF_400_YEARS - _DAY_OF_1970
    return dt.date(year, month, day).toordinal() - _DAY_OF_1970


def _integer(text: str, bits: int) -> int:
    match = _INTEGER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an integer")
    sign_bit = 1 << (bits - 1)
    if match["hex"] is None:
        number = int(text)
    elif len(match["hex"]) * 4 <= bits:
        number = (int(match["hex"], 16) ^ sign_bit) - sign_bit  # two's complement
    else:
        raise ValueError(f"{text!r} has more than {bits} bits")
    if not -sign_bit <= number < sign_bit:
        raise ValueError(f"{text!r} does not fit into {bits} bits")
    return number


def _decimal(text: str, precision: int, scale: int) -> decimal.Decimal:
    match = _DECIMAL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a decimal number")
    fraction = match["fraction"] or ""
    digits = int(match["whole"] + fraction)
    exponent = int(match["exponent"] or 0) - len(fraction)
    if digits >= 10**MAX_DIGITS or exponent > MAX_DIGITS:
        raise ValueError(f"{text!r} has more than {MAX_DIGITS} digits")
    shift = max(exponent + scale, -MAX_DIGITS - 1)  # limited: this one leaves no digit already
    unscaled, lost = divmod(digits * 10 ** max(shift, 0), 10 ** max(-shift, 0))
    if lost or unscaled >= 10**precision:
        raise ValueError(f"{text!r} does not fit into DECIMAL({precision}, {scale})")
    return decimal.Decimal(f"{match['sign']}{unscaled}E-{scale}")
