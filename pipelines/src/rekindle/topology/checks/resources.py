"""Checks of `resources`: invalid quantities, unknown fields, limits below requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.errors import Problem
from rekindle.topology.problems import did_you_mean, nearest
from rekindle.topology.resources import PARSERS, RESOURCE_FIELDS, given_value

_MIN_SIMILARITY = 0.7  # above that of gpu and cpu


def check_resources(resources: Mapping[str, Any], path: str) -> list[Problem]:
    """Invalid quantities, unknown fields, limits below requests."""
    found = [
        Problem(
            f"{path}.{field}",
            "UnknownField",
            f"unknown field {field}",
            nearest(field, RESOURCE_FIELDS),
        )
        for field in resources
        if field not in RESOURCE_FIELDS
    ]
    for field in RESOURCE_FIELDS:
        values = resources.get(field)
        if values is not None and not isinstance(values, Mapping):
            found.append(Problem(f"{path}.{field}", "InvalidValue", "is not a mapping"))
            continue
        for name, value in (values or {}).items():
            found += _check_quantity(name, value, f"{path}.{field}")
    return found or list(_check_limits(resources, path))


def _check_quantity(name: str, value: Any, path: str) -> Iterator[Problem]:
    if name not in PARSERS:
        elsewhere = "write it in spec.podTemplate.spec, resources of the container task"
        hint = did_you_mean(str(name), PARSERS, _MIN_SIMILARITY) or elsewhere
        yield Problem(f"{path}[{name}]", "UnknownField", f"{name} is not cpu or memory", hint)
        return
    try:
        if PARSERS[name](value) <= 0:
            what, hint = f"{value!r} is not more than 0", "leave it out, or write what a task needs"
            yield Problem(f"{path}.{name}", "InvalidQuantity", what, hint)
    except ValueError as error:
        yield Problem(f"{path}.{name}", "InvalidQuantity", str(error))


def _check_limits(resources: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, parse in PARSERS.items():
        request, limit = (given_value(resources, field, name) for field in RESOURCE_FIELDS)
        if request is not None and limit is not None and parse(limit) < parse(request):
            what = f"{limit!r} is less than the request, {request!r}"
            yield Problem(f"{path}.limits.{name}", "InvalidQuantity", what, "write at least that")
