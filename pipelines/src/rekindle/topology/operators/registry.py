"""The kinds of operators. A new kind is a module beside this one, and a line in `KINDS`.

Exactly one kind is set. Kinds of `OperatorSpec.KINDS` that are not in `KINDS` are refused as not
supported yet.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.topology.operators.distinct import DistinctOperatorKind
from rekindle.topology.operators.join import JoinOperatorKind
from rekindle.topology.operators.kind import OperatorKind
from rekindle.topology.operators.sql import SqlOperatorKind
from rekindle.topology.operators.window import WindowOperatorKind
from rekindle.topology.spec import OperatorSpec, SourceSpec

KINDS: Mapping[str, type[OperatorKind]] = {
    "sql": SqlOperatorKind,
    "window": WindowOperatorKind,
    "join": JoinOperatorKind,
    "distinct": DistinctOperatorKind,
}
"""By the field of `OperatorSpec` that says what an operator does."""


def kind_of(node: SourceSpec | OperatorSpec) -> OperatorKind | None:
    """None for a source, and for an operator of no kind that is supported."""
    if isinstance(node, SourceSpec):
        return None
    return next(
        (kind(node) for field, kind in KINDS.items() if getattr(node, field) is not None), None
    )
