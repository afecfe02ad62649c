"""Types of columns, as far as sqlglot can tell them without Spark.

The names of an inferred schema are right; a type that cannot be told is STRING and marked
(`type_is_known`). Such a schema serves checks, never data: the engine asks Spark when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types
from sqlglot.schema import MappingSchema

from rekindle.topology.ddl import TIMESTAMP, arrow_to_ddl, ddl_to_schema
from rekindle.topology.findings import InvalidSql
from rekindle.topology.tokens import DIALECT

_UNKNOWN = {b"rekindle.type": b"unknown"}
_TRUNCATIONS = (exp.TimestampTrunc, exp.DateTrunc)
_TABLE = "__input"
_DIFFERS_FROM_SPARK = (exp.DataType.Type.DECIMAL, exp.DataType.Type.TINYINT)
"""Results that sqlglot takes for another type than Spark does: precision, and year() as a byte."""


def field_of(name: str, kind: pa.DataType | None) -> pa.Field:
    """A field; with None for a type that cannot be told."""
    if kind is None:
        return pa.field(name, pa.string(), metadata=_UNKNOWN)
    return pa.field(name, kind)


def type_is_known(field: pa.Field) -> bool:
    return not field.metadata or b"rekindle.type" not in field.metadata


def known_type(field: pa.Field) -> pa.DataType | None:
    return field.type if type_is_known(field) else None


def infer_types(
    expressions: Iterable[exp.Expr], columns: Iterable[pa.Field]
) -> list[pa.DataType | None]:
    """The type of each expression over one table of `columns`, None where it cannot be told."""
    fields = list(columns)
    items = [e.copy() for e in expressions]
    by_name = {f.name.lower(): f for f in fields}
    select = exp.select(*items).from_(_TABLE)
    for column in select.find_all(exp.Column):
        if len(column.parts) == 1 and column.name.lower() in by_name:
            column.set("table", exp.to_identifier(_TABLE))
    known = {
        name: arrow_to_ddl(field.type) for name, field in by_name.items() if type_is_known(field)
    }
    if known:
        schema = MappingSchema({_TABLE: known}, dialect=DIALECT)
        try:
            annotate_types(select, schema=schema, dialect=DIALECT)
        except (SqlglotError, ValueError, KeyError):
            return [None for _ in items]
    return [_arrow(item) for item in select.expressions]


def _arrow(item: exp.Expr) -> pa.DataType | None:
    tree = item.unalias()
    if isinstance(tree, _TRUNCATIONS):
        return TIMESTAMP
    kind = tree.type
    if kind is None or kind.is_type(exp.DataType.Type.UNKNOWN, exp.DataType.Type.NULL):
        return None
    computed = not isinstance(tree, exp.Column | exp.Cast)
    if computed and kind.is_type(*_DIFFERS_FROM_SPARK):
        return None
    text = "STRING" if kind.is_type(*exp.DataType.TEXT_TYPES) else kind.sql(dialect=DIALECT)
    try:
        return ddl_to_schema(f"c {text}").field(0).type
    except InvalidSql:
        return None
