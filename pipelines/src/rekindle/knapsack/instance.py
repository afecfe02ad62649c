"""Instances as JSON: capacity, operators with their costs, queries with what they need. Pure.

    {"capacity": {"cpu": 16, "memory": "64Gi"},
     "operators": {"clean": {"cpu": "500m", "memory": "1Gi"}},
     "queries": {"alerts": {"priority": 100, "operators": ["clean"]}}}

Amounts are numbers or quantities of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rekindle.errors import RekindleError
from rekindle.knapsack.problem import KnapsackProblem
from rekindle.quantities import parse_quantity

_MAX_PRIORITY = 10**15  # sums of which are exact in the solver, too
_MAX_DIGITS = 30  # before and after the decimal point


class InvalidInstance(RekindleError):
    """`field`: its path."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


@dataclass(frozen=True, slots=True)
class Instance:
    query_names: Sequence[str]  # in the numbering of the problem
    problem: KnapsackProblem


def parse_instance(document: Any) -> Instance:
    """Raises InvalidInstance."""
    document = _mapping(document, "the instance", {"capacity", "operators", "queries"})
    capacity = _mapping(document.get("capacity"), "capacity")
    operators = _mapping(document.get("operators"), "operators")
    queries = _mapping(document.get("queries"), "queries")
    amounts = {name: _amount(value, f"capacity.{name}") for name, value in capacity.items()}
    costs: dict[str, dict[str, Decimal]] = {}
    for name, of in operators.items():
        field = f"operators.{name}"
        costs[name] = {r: _amount(v, f"{field}.{r}") for r, v in _mapping(of, field).items()}
        for resource in costs[name].keys() - amounts.keys():
            raise InvalidInstance(
                f"{field}.{resource}", "capacity does not have this resource; add it, or 0 of it"
            )
    numbers = {name: number for number, name in enumerate(operators)}
    priorities, needs = [], []
    for name, query in queries.items():
        query = _mapping(query, f"queries.{name}", {"priority", "operators"})
        priorities.append(_priority(query.get("priority"), f"queries.{name}.priority"))
        needs.append(_needs(query.get("operators"), numbers, f"queries.{name}.operators"))
    rows, limits = [], []
    for resource, amount in amounts.items():
        row = [costs[name].get(resource, Decimal(0)) for name in operators]
        unit = Decimal(10) ** max(_decimals(value) for value in [amount, *row])
        rows.append([int(value * unit) for value in row])
        limits.append(int(amount * unit))
    return Instance(list(queries), KnapsackProblem(priorities, needs, rows, limits))


def _mapping(value: Any, field: str, keys: set[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInstance(field, f"must be an object, not {value!r:.60}")
    for unknown in value.keys() - (keys if keys is not None else value.keys()):
        raise InvalidInstance(field, f"unknown field {unknown}")
    return value


def _amount(value: Any, field: str) -> Decimal:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{value!r:.60} is not a quantity; write it like 250m, 2 or 1Gi")
        amount = parse_quantity(value)
    except ValueError as error:
        raise InvalidInstance(field, str(error)) from error
    if amount < 0:
        raise InvalidInstance(field, f"{value!s:.60} is negative")
    if amount and not -_MAX_DIGITS <= amount.adjusted() < _MAX_DIGITS:
        raise InvalidInstance(field, f"{value!s:.60} must be from 1e-30 to 1e30, or 0")
    return amount


def _priority(value: Any, field: str) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_PRIORITY:
        raise InvalidInstance(field, f"must be a whole number from 0 to 10^15, not {value!r:.60}")
    return int(value)


def _needs(value: Any, numbers: Mapping[str, int], field: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidInstance(field, f"must be a list of names of operators, not {value!r:.60}")
    for name in value:
        if not isinstance(name, str) or name not in numbers:
            raise InvalidInstance(field, f"there is no operator {name!r:.60}")
    return sorted({numbers[name] for name in value})


def _decimals(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(-exponent, 0) if isinstance(exponent, int) else 0
