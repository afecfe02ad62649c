"""The operators with state, by the field of `OperatorSpec` that says what they do. A new one is a
module beside this one, and a line in `_OPEN`.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from rekindle.engine.operators.base import Analyze, Operator
from rekindle.engine.operators.distinct import open_distinct
from rekindle.engine.operators.join import open_join
from rekindle.engine.operators.window import open_window
from rekindle.topology.model import Node, Topology
from rekindle.topology.spec import OperatorSpec

_OPEN: Mapping[str, Callable[[Node, Topology, Sequence[pa.Schema], Analyze], Operator]] = {
    "window": open_window,
    "join": open_join,
    "distinct": open_distinct,
}


def has_state(node: Node) -> bool:
    """Whether it is an operator with state. Others are `sql`."""
    return any(getattr(node.spec, field, None) is not None for field in _OPEN)


def open_operator(
    node: Node, topology: Topology, inputs: Sequence[pa.Schema], analyze: Analyze
) -> Operator:
    """`inputs`: their schemas. Raises OperatorRefused, if `analyze` does or columns have types that
    the operator cannot use."""
    assert isinstance(node.spec, OperatorSpec)
    found = next(o for field, o in _OPEN.items() if getattr(node.spec, field) is not None)
    return found(node, topology, inputs, analyze)
