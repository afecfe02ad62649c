"""Fields of v1alpha1 that this version does not support: refused with a reason, never ignored.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from rekindle.errors import Problem
from rekindle.topology.operators.registry import KINDS
from rekindle.topology.problems import NOT_SUPPORTED_YET
from rekindle.topology.spec import (
    OperatorSpec,
    SinkSpec,
    TopologySpec,
    kinds_of,
)

_SUPPORTED_OPERATORS = " or ".join(KINDS)


def _unsupported_kinds(spec: type[BaseModel], what: str) -> dict[str, tuple[str, str]]:
    kinds = kinds_of(spec)
    supported = " or ".join(kind for kind, options in kinds.items() if options.connector)
    return {
        kind: (f"a {kind} {what}", f"use {supported}")
        for kind, options in kinds.items()
        if not options.connector
    }


UNSUPPORTED: Mapping[type[BaseModel], Mapping[str, tuple[str, str]]] = {
    TopologySpec: {
        "executors": (
            "a number of executors",
            "leave it out: a task runs in one pod; raise resources, or partitions",
        ),
        "deletion_policy": (
            "deletionPolicy Delete",
            "use Retain, and delete the checkpoints and outputs yourself",
        ),
    },
    OperatorSpec: {
        kind: (f"the operator {kind}", f"use {_SUPPORTED_OPERATORS}")
        for kind in OperatorSpec.KINDS
        if kind not in KINDS
    },
    SinkSpec: _unsupported_kinds(SinkSpec, "sink"),
}
"""Fields that only accept their default: a name for other values, and a hint."""


def check_unsupported(spec: TopologySpec) -> Iterator[Problem]:
    """Every use of a field that is not supported yet."""
    yield from _check(spec, "spec")


def _check(node: BaseModel, path: str) -> Iterator[Problem]:
    for field, (what, hint) in UNSUPPORTED.get(type(node), {}).items():
        if getattr(node, field) != type(node).model_fields[field].get_default():
            where = f"{path}.{type(node).model_fields[field].alias or field}"
            yield Problem(where, NOT_SUPPORTED_YET, f"{what} is not supported yet", hint)
    for field, info in type(node).model_fields.items():
        value, where = getattr(node, field), f"{path}.{info.alias or field}"
        if isinstance(value, BaseModel):
            yield from _check(value, where)
        elif isinstance(value, tuple):
            for at, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _check(item, f"{where}[{at}]")
