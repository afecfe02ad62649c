"""Converts a column value by value: NULL where one does not fit, and what is wrong with it.

The table of `rekindle.connectors.conversions` converts whole columns and refuses them whole. So
what surely fits, and what surely does not, is told by patterns, at the cost of two passes; of the
others the values that do not fit are found by halves; then all but these are converted at once. If
what should fit does not, all that does not is found by halves of the whole column. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.connectors.conversions import (
    CONVERSION_FAILURES,
    Kind,
    TextRules,
    convert,
    describe_unconvertible,
    kind_of,
)

_DAY = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?Z?"
_ANY_DAY = r"[+-]?\d{4,9}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_ANY_TIME = r"([01]\d|2[0-4])(:[0-5]\d(:([0-5]\d|60)(\.\d{0,6}0*)?)?)?"
_ANY_ZONE = r"(UTC|[zZ]|[+-]\d{2}(:?\d{2})?(\[[\w/+-]+\])?|Z\[[\w/+-]+\])?"
_BLANKS = r"[^!-~]*"  # spaces are in it, also those that are not in ASCII
_DIGITS = {8: 2, 16: 4, 32: 9, 64: 18}
"""So many digits are in the range of a whole number of so many bits."""
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ConvertedValues:
    """`bad`: what is wrong with values, by their row; these are NULL in `column`."""

    column: pa.Array
    bad: Mapping[int, str]


def convert_each(
    column: pa.Array, field: pa.Field, where: str, rules: TextRules
) -> ConvertedValues:
    """The column in its declared type, value by value."""
    bad = dict[int, str]()
    converted = column
    if column.type != field.type:
        try:
            converted = convert(column, field.type, rules)
        except CONVERSION_FAILURES:
            converted, failing = _convert_most(column, field.type, rules)
            bad = {
                row: f"{where}: {describe_unconvertible(column, row, field, rules)}"
                for row in failing.tolist()
            }
    if converted.null_count and not field.nullable:
        for row in np.flatnonzero(converted.is_null().to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(row, f"{where}: NULL in a NOT NULL column")
    return ConvertedValues(converted, bad)


def _convert_most(column: pa.Array, target: pa.DataType, rules: TextRules) -> tuple[pa.Array, Rows]:
    """The values that fit, and the rows of the others."""
    pattern = surely_fits(target) if kind_of(column.type) is Kind.TEXT else None
    if pattern is not None:
        texts = pc.cast(column, pa.large_string())
        fits, fails = _matches(texts, pattern), ~_matches(texts, may_fit(target))
        doubtful = np.flatnonzero(~fits & ~fails)
        values = texts.take(pa.array(doubtful)).dictionary_encode()
        wrong = by_halves(values.dictionary, target, rules)
        fails[doubtful] = np.isin(values.indices.to_numpy(), wrong)
        failing = np.flatnonzero(fails)
        try:
            return _convert_without(column, failing, target, rules), failing
        except CONVERSION_FAILURES:
            pass
    failing = by_halves(column, target, rules)
    return _convert_without(column, failing, target, rules), failing


def _matches(texts: pa.Array, pattern: str | None) -> npt.NDArray[np.bool_]:
    """NULL does, and without a pattern all do."""
    if pattern is None:
        return np.ones(len(texts), np.bool_)
    found = pc.fill_null(pc.match_substring_regex(texts, pattern), True)
    matches: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False).copy()
    return matches


def by_halves(column: pa.Array, target: pa.DataType, rules: TextRules) -> Rows:
    """The rows whose values do not fit, found by converting halves of those that do not."""
    found, left = list[int](), [(0, len(column))] if len(column) else []
    while left:
        first, size = left.pop()
        try:
            convert(column.slice(first, size), target, rules)
        except CONVERSION_FAILURES:
            if size == 1:
                found.append(first)
            else:
                left += [(first + size // 2, size - size // 2), (first, size // 2)]
    return np.array(found, np.int64)


def _convert_without(
    column: pa.Array, failing: Rows, target: pa.DataType, rules: TextRules
) -> pa.Array:
    if len(failing) == len(column):
        return pa.nulls(len(column), target)
    left_out = np.zeros(len(column), np.bool_)
    left_out[failing] = True
    rows = pa.array(np.arange(len(column)), mask=left_out)
    return convert(column.take(rows), target, rules)


def surely_fits(target: pa.DataType) -> str | None:
    """Matches only texts that are values of the type; None: nothing is known."""
    types = pa.types
    if types.is_integer(target):
        return rf"^(-?[0-9]{{1,{_DIGITS[target.bit_width]}}})?$"
    if types.is_floating(target):
        return r"^(-?[0-9]{1,15}(\.[0-9]{1,15})?)?$"
    if types.is_decimal(target) and target.precision > target.scale:
        fraction = rf"(\.[0-9]{{1,{target.scale}}})?" if target.scale else ""
        return rf"^(-?[0-9]{{1,{target.precision - target.scale}}}{fraction})?$"
    if types.is_timestamp(target):
        return rf"^({_DAY}[T ]{_TIME})?$"
    if types.is_date(target):
        return rf"^({_DAY})?$"
    return r"^(true|false)?$" if types.is_boolean(target) else None


def may_fit(target: pa.DataType) -> str | None:
    """Matches all texts that are values of the type, and few others: each of these costs several
    conversions; None: nothing is known."""
    types = pa.types
    if types.is_integer(target):
        return r"^[0-9+-]*$"
    if types.is_floating(target):
        return r"^[0-9+.eEiInNfFtTyYaA-]*$"
    if types.is_decimal(target):
        return r"^[0-9+.eE-]*$"
    if types.is_timestamp(target):
        return rf"^{_BLANKS}({_ANY_DAY}([Tt ]{_ANY_TIME})?\s*{_ANY_ZONE}{_BLANKS})?$"
    return rf"^({_ANY_DAY})?$" if types.is_date(target) else None
