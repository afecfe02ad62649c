"""Infers types of columns without Spark, with sqlglot.

The names of an inferred schema are right; a type may be unknown. Such a schema is used for checks,
never for data: the engine gets the types from Spark when it starts.

Design: docs/design/compilation.md#row-wise-sql.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from itertools import islice

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types
from sqlglot.schema import MappingSchema

from rekindle.topology.problems import InvalidSql
from rekindle.topology.schema import DataType, Field, Scalar, type_to_ddl
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.tokens import DIALECT

_TABLE = "__input"
_SPARK = Dialect.get_or_raise(DIALECT)
_Type = exp.DataType.Type
_TIMES = (_Type.DATE, _Type.TIMESTAMP, _Type.TIMESTAMPLTZ, _Type.TIMESTAMPNTZ, _Type.TIMESTAMPTZ)
_REFUSED = (_Type.MAP, _Type.INTERVAL, _Type.TIMESTAMPNTZ, _Type.VARIANT)
_DIFFERS_FROM_SPARK = (_Type.DECIMAL, _Type.TINYINT)
"""Result types that differ between sqlglot and Spark: precision, and year() as a byte."""
_CALLS_THAT_DIFFER = (
    exp.ArrayPosition,
    exp.DateDiff,
    exp.DateTrunc,
    exp.Extract,
    exp.Getbit,
    exp.Round,
    exp.SafeDivide,
    exp.TimestampDiff,
)
_INDEPENDENT_OF_PARTS = (_Type.BOOLEAN, *exp.DataType.TEXT_TYPES)
"""Types of an expression that do not depend on the types of its parts."""
_MAX_NODES = 500
"""Maximum size of an expression whose type is inferred: the operator validates all topologies in
one thread. The types of larger expressions are unknown until Spark determines them."""


def is_timestamp(data_type: exp.DataType) -> bool:
    return data_type.this in (_Type.TIMESTAMP, _Type.TIMESTAMPLTZ, _Type.TIMESTAMPTZ)


def infer_types(expressions: Iterable[exp.Expr], columns: Iterable[Field]) -> list[DataType | None]:
    """The type of each expression over one table of `columns`, None if it is unknown."""
    return [_type_of(item) for item in _annotated(expressions, columns)]


def unsupported_type(expression: exp.Expr, columns: Iterable[Field]) -> str | None:
    """The name of an expression's type if it is known to be unsupported; None otherwise."""
    (item,) = _annotated([expression], columns)
    tree = _innermost_of_same_type(item.unalias())
    if _is_interval(tree):
        return "INTERVAL"
    data_types = [] if tree.type is None else list(tree.type.find_all(exp.DataType))
    named = next((data_type for data_type in data_types if data_type.this in _REFUSED), None)
    if named is None or _has_interval_inside(tree):
        return None
    return "TIMESTAMP_NTZ" if named.this is _Type.TIMESTAMPNTZ else str(named.sql(dialect=DIALECT))


def _innermost_of_same_type(tree: exp.Expr) -> exp.Expr:
    """The innermost expression of the same type, inside parentheses, min, max and FILTER."""
    while isinstance(tree, exp.Paren | exp.Max | exp.Min | exp.Filter):
        tree = tree.this
    return tree


def _is_interval(tree: exp.Expr) -> bool:
    """Whether the type is INTERVAL: also of a time minus a time, for which sqlglot infers a
    time."""
    if isinstance(tree, exp.Interval):
        return True
    sides = (tree.this, tree.expression) if isinstance(tree, exp.Sub) else ()
    return bool(sides) and all(s.type is not None and s.type.this in _TIMES for s in sides)


def _has_interval_inside(tree: exp.Expr) -> bool:
    return any(_is_interval(node) for node in tree.find_all(exp.Sub))


def _annotated(expressions: Iterable[exp.Expr], columns: Iterable[Field]) -> list[exp.Expr]:
    fields = list(columns)
    items = [e.copy() for e in expressions]
    select = exp.Select(
        expressions=[item for item in items if not is_too_large_to_infer(item)],
        from_=exp.From(this=exp.Table(this=exp.to_identifier(_TABLE))),
    )
    used: dict[str, list[exp.Column]] = {}
    for column in select.find_all(exp.Column):
        if len(column.parts) == 1:
            used.setdefault(column.name.lower(), []).append(column)
    # Only the columns in use: a table may have a thousand, and as many expressions.
    by_name = {name: f.type for f in fields if (name := f.name.lower()) in used}
    for name in by_name:
        for column in used[name]:
            column.set("table", exp.to_identifier(_TABLE))
    typed = {name: data_type for name, data_type in by_name.items() if data_type is not None}
    if not typed:
        some = ((f.name.lower(), f.type) for f in fields if f.type is not None)
        typed = dict(islice(some, 1))
    if typed:
        known = {name: _sqlglot_type(data_type).copy() for name, data_type in typed.items()}
        schema = MappingSchema({_TABLE: known}, dialect=DIALECT)
        with contextlib.suppress(SqlglotError, ValueError, KeyError):
            annotate_types(select, schema=schema, dialect=DIALECT)
    found = iter(select.expressions)
    return [item if is_too_large_to_infer(item) else next(found) for item in items]


@functools.lru_cache(maxsize=256)
def _sqlglot_type(data_type: DataType) -> exp.DataType:
    """As a MappingSchema parses it, with names of fields in lower case."""
    parsed = exp.DataType.from_str(type_to_ddl(data_type), dialect=DIALECT)
    normalized: exp.DataType = parsed.transform(_SPARK.normalize_identifier, copy=False)
    return normalized


def is_too_large_to_infer(tree: exp.Expr) -> bool:
    """Whether the expression is so large that its type is not inferred."""
    return next(islice(tree.walk(), _MAX_NODES, None), None) is not None


def _type_of(item: exp.Expr) -> DataType | None:
    tree = item.unalias()
    match tree:
        case exp.TimestampTrunc():
            return Scalar.TIMESTAMP
        case exp.DateTrunc():
            return Scalar.DATE
    data_type = tree.type
    if data_type is None or data_type.this in (_Type.UNKNOWN, _Type.NULL):
        return None
    if data_type.this in _TIMES and _has_interval_inside(tree):
        return None
    computed = not isinstance(tree, exp.Column | exp.Cast)
    if computed and (data_type.this in _DIFFERS_FROM_SPARK or _is_doubtful(tree, data_type)):
        return None
    text = "STRING" if data_type.this in exp.DataType.TEXT_TYPES else data_type.sql(dialect=DIALECT)
    try:
        return ddl_to_schema(f"c {text}").fields[0].type
    except InvalidSql:
        return None


def _is_doubtful(tree: exp.Expr, data_type: exp.DataType) -> bool:
    """Whether the type may depend on a part whose type differs between sqlglot and Spark."""
    if any(_is_binary(node) for node in tree.find_all(exp.DPipe)):
        return True
    parts = tree.walk(prune=lambda node: isinstance(node, exp.Cast))
    return data_type.this not in _INDEPENDENT_OF_PARTS and any(_differs(node) for node in parts)


def _differs(node: exp.Expr) -> bool:
    if isinstance(node, exp.Literal):
        return bool(node.is_number and "." in node.name)  # a DECIMAL
    return isinstance(node, (*_CALLS_THAT_DIFFER, exp.Null))


def _is_binary(pipe: exp.DPipe) -> bool:
    """Whether `||` concatenates BINARY, not strings."""
    return any(s.type is not None and s.type.this is _Type.BINARY for s in pipe.iter_expressions())
