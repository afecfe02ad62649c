"""Sums of wide decimals that are exact and independent of the order of rows. Pure.

A sum of DECIMAL has 38 digits in Spark and stays NULL after an overflow, so the result would depend
on the order of rows and their division into epochs. So decimals of 28 digits and more are added as
two sums, of the digits above and below the 20th from the right, neither of which can exceed 38
digits before 10^10 rows. When a window closes, the two are combined; if the result has more than 38
digits it is NULL, like Spark's sum of all rows.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from rekindle.engine.window_state import GroupShape
from rekindle.topology.sql.aggregates import Partial
from rekindle.topology.sql.tokens import DIALECT, parse

MAX_DIGITS = 38
_SUM_DIGITS = 10
"""In Spark, SUM of DECIMAL(p) is DECIMAL(p + 10), with MAX_DIGITS at most."""
_LOW_DIGITS = 20
_HIGH_DIGITS = 18
HIGH, LOW = "__h", "__l"
"""Suffixes of a partial's name for its two sums."""


def is_wide(data_type: pa.DataType, merge: str) -> bool:
    """Whether a partial of this type may overflow: its sum has the most digits that Spark has."""
    return merge == "sum" and pa.types.is_decimal(data_type) and data_type.precision == MAX_DIGITS


def split_sum(partial: Partial, scale: int) -> tuple[Partial, Partial]:
    """The two sums that replace a sum of decimals with `scale` digits after the point."""
    (call,) = parse(f"SELECT {partial.sql}").expressions
    condition = f" FILTER(WHERE {call.expression.this.sql(DIALECT)})" if _is_filter(call) else ""
    argument = (call.this if _is_filter(call) else call).this.sql(dialect=DIALECT)
    unit = _unit_sql(scale)
    high = f"SUM(CAST(({argument}) DIV {unit} AS DECIMAL({_HIGH_DIGITS}, 0))){condition}"
    low = f"SUM(({argument}) % {unit}){condition}"
    return (
        Partial(partial.name + HIGH, high, "sum"),
        Partial(partial.name + LOW, low, "sum"),
    )


def combine_sums(high: pa.ChunkedArray, low: pa.ChunkedArray, scale: int) -> pa.ChunkedArray:
    """The sum as DECIMAL(38, scale); NULL if it has more digits."""
    unit_scale = max(0, scale - _LOW_DIGITS)
    unit_type = pa.decimal256(unit_scale or _LOW_DIGITS + 1 - scale, unit_scale)
    high_type = pa.decimal256(_HIGH_DIGITS + _SUM_DIGITS, 0)
    low_type = pa.decimal256(max(_LOW_DIGITS + 1, scale) + _SUM_DIGITS, scale)
    upper = pc.multiply(high.cast(high_type), pa.scalar(_unit(scale), unit_type))
    total = pc.add(upper, low.cast(low_type))
    limit = pa.scalar(Decimal(10) ** (MAX_DIGITS - scale), pa.decimal256(MAX_DIGITS + 1, scale))
    fits = pc.less(pc.abs(total), limit)
    kept = pc.if_else(fits, total, pa.scalar(None, total.type))
    return kept.cast(pa.decimal128(MAX_DIGITS, scale))


def combined_partials(shape: GroupShape) -> list[tuple[str, pa.DataType]]:
    """Names and types of a window's partials after combining the sums."""
    scales = dict(shape.wide_sums)
    found: list[tuple[str, pa.DataType]] = []
    for name, data_type, _ in shape.partials:
        whole = name.removesuffix(HIGH).removesuffix(LOW)
        if whole not in scales:
            found.append((name, data_type))
        elif name.endswith(HIGH):
            found.append((whole, pa.decimal128(MAX_DIGITS, scales[whole])))
    return found


def combine_all_sums(table: pa.Table, shape: GroupShape) -> pa.Table:
    """A table of partials after combining the sums."""
    for name, scale in shape.wide_sums:
        whole = combine_sums(table.column(name + HIGH), table.column(name + LOW), scale)
        table = table.drop_columns([name + HIGH, name + LOW]).append_column(name, whole)
    return table


def _is_filter(call: exp.Expr) -> bool:
    return isinstance(call, exp.Filter)


def _unit(scale: int) -> Decimal:
    """The value of the lowest digit of the high sum."""
    return Decimal(1).scaleb(_LOW_DIGITS - scale)


def _unit_sql(scale: int) -> str:
    if scale <= _LOW_DIGITS:
        return f"CAST('{_unit(scale):f}' AS DECIMAL({_LOW_DIGITS + 1 - scale}, 0))"
    digits = scale - _LOW_DIGITS
    return f"CAST('{_unit(scale):f}' AS DECIMAL({digits}, {digits}))"
