"""Finds unsupported types of columns, and unsupported expressions, in Spark's analysis of an
operator. Through Py4J, without a job.

SQL is first checked without Spark (`rekindle.topology`), where many types are unknown; here all are
known. Columns must have types that are equivalent in Spark, Arrow, Parquet and JSON, and
expressions must be deterministic.

Design: docs/design/engine.md#sql, docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from rekindle.engine.spark.plans import class_name, each
from rekindle.topology.sql.casts_without_date import STARTS_WITH_YEAR
from rekindle.topology.sql.ddl import hint_for

_SUPPORTED_SCALARS = (
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    TimestampType,
)
_TIMESTAMP_TYPE = re.compile(r"\btimestamp(_ltz)?\b")


def unsupported_column(schema: StructType) -> str | None:
    """A message about the first column of an unsupported type, with a hint; None if there is
    none."""
    for field in schema.fields:
        unsupported = _unsupported_type(field.dataType)
        if unsupported is not None:
            name = unsupported.simpleString()
            return f"column {field.name} has the type {name}, {_hint_text(unsupported)}"
    return None


def unsupported_expression(frame: DataFrame, *, row_wise: bool) -> str | None:
    """A message about an expression that reads the clock, or other rows although `row_wise`; None
    if there is none.

    Strings that are cast to TIMESTAMP without a date get the current date. Explicit casts have been
    guarded (`rekindle.topology.sql.casts_without_date`); this finds implicit casts.
    """
    plan = frame._jdf.queryExecution().analyzed()
    nodes = json.loads(plan.toJSON())
    if row_wise and any(node["class"].endswith(".Aggregate") for node in nodes):
        return "it has an aggregate, and sql works row by row; use an operator with window"
    if row_wise and not plan.deterministic():
        return "it has an expression that gives another result when an epoch is computed again"
    if all(_casts_no_string(operand) for operand in _operands_of_timestamp_casts(nodes)):
        return None
    text = next(_operands_cast_to_timestamp(plan), None)
    if text is None:
        return None
    hint = "write CAST(... AS TIMESTAMP) around it: that gives NULL for a string without a date"
    return f"{text} is cast to TIMESTAMP, and gets the current date if it has none; {hint}"


def _unsupported_type(data_type: DataType) -> DataType | None:
    match data_type:
        case ArrayType():
            return _unsupported_type(data_type.elementType)
        case StructType():
            found = (_unsupported_type(field.dataType) for field in data_type.fields)
            return next((t for t in found if t is not None), None)
        case StringType():
            return None if data_type.isUTF8BinaryCollation() else data_type
        case _:
            return None if type(data_type) in _SUPPORTED_SCALARS else data_type


def _hint_text(data_type: DataType) -> str:
    if isinstance(data_type, StringType):
        return "which is not supported; remove the collation with COLLATE UTF8_BINARY"
    hint = hint_for(data_type.simpleString())
    return f"which is not supported; {hint}" if hint else "which is not supported"


def _operands_of_timestamp_casts(tree: Any) -> Iterator[dict[str, Any]]:
    """The operand of each cast to TIMESTAMP in a plan's JSON. A tree is a list of its nodes,
    parents first."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _operands_of_timestamp_casts(value)
    elif isinstance(tree, list):
        for index, node in enumerate(tree):
            is_cast = isinstance(node, dict) and node.get("class", "").endswith(".Cast")
            if is_cast and _TIMESTAMP_TYPE.search(json.dumps(node.get("dataType"))):
                yield tree[index + 1]
            yield from _operands_of_timestamp_casts(node)


def _casts_no_string(operand: dict[str, Any]) -> bool:
    """Whether the operand has no string that could lack a date: by its type, or as a literal."""
    data_type = operand.get("dataType")
    if data_type == "string" and operand["class"].endswith(".Literal"):
        return re.match(STARTS_WITH_YEAR, str(operand.get("value"))) is not None
    return data_type is not None and "string" not in json.dumps(data_type)


def _operands_cast_to_timestamp(plan: JavaObject) -> Iterator[str]:
    for expression in each(plan.expressions()):
        yield from _operands_in(expression)
    for child in each(plan.children()):
        yield from _operands_cast_to_timestamp(child)


def _operands_in(expression: JavaObject) -> Iterator[str]:
    """The SQL of each operand in an expression whose strings, also those in arrays and structs, are
    cast to TIMESTAMP."""
    target = expression.dataType().catalogString() if class_name(expression) == "Cast" else ""
    if _TIMESTAMP_TYPE.search(target):
        operand = expression.child()
        operand_type = operand.dataType().catalogString()
        timestamps = len(_TIMESTAMP_TYPE.findall(operand_type))
        adds_timestamp = timestamps < len(_TIMESTAMP_TYPE.findall(target))
        if "string" in operand_type and adds_timestamp and not _has_date(operand):
            yield str(operand.sql())
    for child in each(expression.children()):
        yield from _operands_in(child)


def _has_date(expression: JavaObject) -> bool:
    """Whether the expression is a literal with a date, or a guarded expression
    (`rekindle.topology.sql.casts_without_date`)."""
    if class_name(expression) == "Literal":
        return re.match(STARTS_WITH_YEAR, str(expression.value())) is not None
    return class_name(expression) == "CaseWhen" and STARTS_WITH_YEAR in str(expression.sql())
