"""Values for the fields of the CRD's schema: plausible ones, and ones at its limits. Pure.

Must not know which values are accepted: the API server and the operator decide that.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle_testing.fixtures.crd import resource_schema
from rekindle_testing.fuzz import values

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]

_DURATION = "(us|ms|s|m|h|d)"  # a part of the pattern of durations
_OPTIONAL = 0.25  # chance of a field that is not required
_MAX_ITEMS = 3
_UNSUPPORTED = frozenset({"python"})
"""Kinds that are refused; drawn less often, so that a good part of the manifests is valid."""
_SUPPORTED_WEIGHT = 3

_BY_FIELD: Mapping[str, Sequence[Any]] = {
    "name": values.NAMES,
    "from": values.NAMES,
    "inputs": values.NAMES,
    "sql": values.SELECTS,
    "aggregate": values.AGGREGATES,
    "expression": values.EVENT_TIME_EXPRESSIONS,
    "schema": values.SCHEMAS,
    "stateSchema": values.SCHEMAS,
    "columns": values.GENERATOR_EXPRESSIONS,
    **dict.fromkeys(("column", "orderBy", "groupBy", "keyBy", "keys"), values.COLUMNS),
    "fileNameColumn": values.COLUMNS,
    "on": values.CONDITIONS,
    "select": values.SELECTED,
    **dict.fromkeys(("url", "store"), values.URLS),
    **dict.fromkeys(("logBudget", "retain"), values.SIZES),
    **dict.fromkeys(("requests", "limits"), values.QUANTITIES),
    "function": ("pkg.module:step", "a:b", "os:system", "a.b", ":", "a:b:c"),
    "podTemplate": values.POD_TEMPLATES,
    "sparkConf": values.SPARK_CONF,
}
_KEYS: Mapping[str, Sequence[str]] = {
    "requests": ("cpu", "memory", "nvidia.com/gpu", "cpus", "", "ephemeral-storage"),
    "limits": ("cpu", "memory", "hugepages-2Mi", "Memory"),
    "columns": values.COLUMNS,
    "sparkConf": tuple(key for conf in values.SPARK_CONF for key in conf),
}
"""Keys of fields with additionalProperties."""


def schema_at(path: Path) -> Schema | None:
    """The schema of a field; None if the CRD does not declare it."""
    schema: Any = resource_schema()
    for part in path:
        if isinstance(part, int):
            schema = schema.get("items")
        else:
            declared = schema.get("properties") or {}
            schema = declared.get(part, schema.get("additionalProperties"))
        if not isinstance(schema, dict):
            return None
    return dict(schema)


def field_name(path: Path) -> str:
    """The name of a field; for an item of a list, the name of the list."""
    return next((part for part in reversed(path) if isinstance(part, str)), "")


def pool(path: Path, schema: Schema | None) -> Sequence[Any]:
    """Values that are written into a field, valid and not."""
    schema = schema or {}
    if "enum" in schema:
        return [*schema["enum"], "", "process", None]
    if _DURATION in str(schema.get("pattern")):
        return (*values.DURATIONS, "Infinite")
    parent = path[-2] if len(path) > 1 and isinstance(path[-2], str) else ""
    for key in (field_name(path), parent):
        if key in _BY_FIELD and (key != "retain" or "x-kubernetes-int-or-string" in schema):
            return _BY_FIELD[key]
    match schema.get("type"):
        case "integer" | "number":
            return values.NUMBERS
        case "boolean":
            return (True, False)
        case "string":
            return values.TEXTS
    return values.ANYTHING


def random_value(path: Path, schema: Schema, rng: random.Random) -> Any:
    """A value of the schema's type. Rules of CEL and patterns may refuse it."""
    if "x-kubernetes-preserve-unknown-fields" in schema and "properties" not in schema:
        return rng.choice(pool(path, schema))
    match schema.get("type"):
        case "object" if "additionalProperties" in schema:
            keys = _KEYS.get(field_name(path), values.NAMES)
            chosen = rng.sample(keys, min(len(keys), rng.randint(0, _MAX_ITEMS)))
            inner = schema["additionalProperties"]
            return {key: random_value((*path, key), inner, rng) for key in chosen}
        case "object":
            return _object(path, schema, rng)
        case "array":
            count = rng.randint(schema.get("minItems", 0), _MAX_ITEMS)
            return [random_value((*path, at), schema["items"], rng) for at in range(count)]
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            least = schema.get("minimum", -3)
            return rng.randint(least, schema.get("maximum", least + 5))
        case "number":
            return rng.choice([0.5, 1, 5, 60, 1000.25])
    return rng.choice(pool(path, schema))


def boundary_values(schema: Schema) -> list[Any]:
    """Values at the limits that the schema declares, and beyond them."""
    found: list[Any] = []
    for key, step in (("minimum", -1), ("maximum", 1)):
        if key in schema:
            found += [schema[key], schema[key] + step]
    if "maxLength" in schema:
        found += ["a" * schema["maxLength"], "a" * (schema["maxLength"] + 1)]
        found += ["ä" * schema["maxLength"]]
    return found


def _object(path: Path, schema: Schema, rng: random.Random) -> dict[str, Any]:
    declared: Mapping[str, Any] = schema.get("properties") or {}
    fields = list(schema.get("required", ()))
    fields += [f for f in declared if f not in fields and rng.random() < _OPTIONAL]
    if kinds := _one_of(schema):
        weights = [1 if kind in _UNSUPPORTED else _SUPPORTED_WEIGHT for kind in kinds]
        fields = [f for f in fields if f not in kinds] + rng.choices(kinds, weights)
    return {field: random_value((*path, field), declared[field], rng) for field in fields}


def _one_of(schema: Schema) -> list[str]:
    """Fields of which CEL requires exactly one, by the message of the rule."""
    for rule in schema.get("x-kubernetes-validations", ()):
        _, found, fields = str(rule["message"]).partition("needs exactly one of ")
        if found:
            return fields.split(", ")
    return []
