"""The source kind `generator`: fields and their validation.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from rekindle.errors import Problem
from rekindle.topology.generator.columns import event_start, expression_hint, parse_column
from rekindle.topology.generator.expressions import ExpressionError
from rekindle.topology.kinds.base import SourceOptions
from rekindle.topology.problems import nearest
from rekindle.topology.schema import Schema


class GeneratorSourceSpec(SourceOptions):
    connector: ClassVar[str | None] = "generator_source:open_source"

    rows_per_second: float = Field(gt=0)
    """Rows for each second."""
    seed: int = 0
    """Seed of the random values."""
    columns: dict[str, str] = Field(default_factory=dict)
    """For each column of the schema an [expression](design/exactly-once.md#sources) that makes its
    values."""
    rows: int | None = Field(None, gt=0)
    """Number of rows after which the source ends; without it, the source is unbounded."""

    @property
    def speed_field(self) -> tuple[str, float] | None:
        return "rowsPerSecond", self.rows_per_second

    def describe(self) -> str:
        return "generator"

    def check_columns(self, schema: Schema, event_time: str | None, path: str) -> Iterator[Problem]:
        """Check that each column of the schema has an expression of its type."""
        where, names = f"{path}.columns", schema.names
        for column in (c for c in self.columns if c not in names):
            what = f"unknown column {column}"
            yield Problem(f"{where}[{column}]", "UnknownColumn", what, nearest(column, names))
        missing = [c for c in names if c not in self.columns]
        if missing:
            what = f"column {missing[0]} of the schema has no expression"
            yield Problem(where, "Missing", what, expression_hint(schema.field(missing[0]).type))
        for field in (f for f in schema if f.name in self.columns):
            text = self.columns[field.name]
            try:
                parse_column(text, field.type)
                if field.name == event_time:
                    event_start(text)  # raises ExpressionError if it is not a timestamp
            except ExpressionError as error:
                at, what = f"{where}[{field.name}]", _with_text(text, str(error))
                yield Problem(at, "InvalidExpression", what, error.hint)


def _with_text(text: str, message: str) -> str:
    """The message with the expression, unless it contains it already."""
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return message if repr(text) in message else f"{shown!r}: {message}"
