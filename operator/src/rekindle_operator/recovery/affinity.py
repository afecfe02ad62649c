"""Required node affinity, as the scheduler reads it. Pure.

Terms are ORed, the requirements of a term ANDed, and a term without any matches no node.

Design: docs/design/recovery.md#plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True)
class Requirement:
    key: str
    operator: str  # In | NotIn | Exists | DoesNotExist | Gt | Lt
    values: tuple[str, ...] = ()
    of_node: bool = False  # a field of the node (its name) and no label

    def met_by(self, value: str | None) -> bool:
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                return self._compared(value)
            case _:
                return False

    def _compared(self, value: str | None) -> bool:
        try:
            own, bound = int(value or ""), int(self.values[0])
        except (ValueError, IndexError):
            return False
        return own > bound if self.operator == "Gt" else own < bound


Term = tuple[Requirement, ...]


def required_terms(affinity: Mapping[str, Any] | None) -> tuple[Term, ...] | None:
    """None: any node is allowed."""
    required = ((affinity or {}).get("nodeAffinity") or {}).get(_REQUIRED)
    if not required:
        return None
    return tuple(_term(term) for term in required.get("nodeSelectorTerms") or ())


def _term(raw: Mapping[str, Any]) -> Term:
    kinds = (("matchExpressions", False), ("matchFields", True))
    return tuple(
        Requirement(r["key"], r["operator"], tuple(r.get("values") or ()), of_node)
        for kind, of_node in kinds
        for r in raw.get(kind) or ()
    )


def readable_terms(terms: tuple[Term, ...]) -> str:
    """For users, with the operators of the manifest."""
    return " or ".join(" and ".join(map(_readable, term)) or "(no term)" for term in terms)


def _readable(requirement: Requirement) -> str:
    values = f" ({', '.join(requirement.values)})" if requirement.values else ""
    return f"{requirement.key} {requirement.operator}{values}"


def matches(terms: tuple[Term, ...] | None, name: str, labels: Mapping[str, str]) -> bool:
    if terms is None:
        return True
    fields = {"metadata.name": name}
    return any(
        term and all(r.met_by((fields if r.of_node else labels).get(r.key)) for r in term)
        for term in terms
    )
