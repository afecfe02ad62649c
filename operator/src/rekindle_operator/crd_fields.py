"""What the CRD in the cluster lacks of the CRD that this operator was built with. Pure.

`helm upgrade` leaves the CRD as it is, so a new operator may find an older one. Then users cannot
set new fields of `spec`; and the API server refuses a whole status for one field that its schema
does not declare, so the operator leaves these out.

A path names a field: `spec.suspend`; `[]` stands for the items of a list, `{}` for the values of a
map. `status.phase=Paused` is a value that an enumeration does not have. If a field is missing, the
fields below it are not named.

Design: docs/design/kubernetes.md#older-crds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_COMPARED = ("spec", "status")
_PRESERVES = "x-kubernetes-preserve-unknown-fields"
_REQUIRED_FIELDS = ("status.slots", "status.generations")
"""Fencing depends on these fields: it is better to place no pods than pods without them."""


def missing_fields(needed: Schema, served: Schema) -> tuple[str, ...]:
    """Paths, sorted, of what the schema `needed` of the resource declares and `served` does not,
    unless `served` preserves unknown fields there. What only `served` has does not matter."""
    found: list[str] = []
    for field in _COMPARED:
        theirs = _properties(served).get(field)
        if theirs is None:
            found.append(field)
        else:
            found += _missing(_properties(needed).get(field, {}), theirs, field)
    return tuple(sorted(found))


def required_missing_fields(missing: Collection[str]) -> list[str]:
    """Those without which no status can be written."""
    return sorted(path for path in missing if path == "status" or _is_below(path, _REQUIRED_FIELDS))


def without_missing(status: Mapping[str, Any], missing: Collection[str]) -> dict[str, Any]:
    """`status` without the fields, and the values of enumerations, that are missing."""
    kept = dict(status)
    if not missing:
        return kept
    left_out = frozenset(p for p in missing if not _is_below(p, _REQUIRED_FIELDS))
    return dict(_without(kept, "status", left_out))


def _missing(needed: Schema, served: Schema, path: str) -> Iterator[str]:
    preserves = bool(served.get(_PRESERVES))
    for name, field in _properties(needed).items():
        theirs = _properties(served).get(name)
        if theirs is not None:
            yield from _missing(field, theirs, f"{path}.{name}")
        elif not preserves and not served.get("additionalProperties"):
            yield f"{path}.{name}"
    for keyword, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        ours, theirs = needed.get(keyword), served.get(keyword)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _missing(ours, theirs, path + suffix)
        elif ours and not theirs and not preserves:
            yield path + suffix
    if "enum" in served:
        values = frozenset(served["enum"])
        yield from (f"{path}={value}" for value in needed.get("enum", ()) if value not in values)


def _properties(schema: Schema) -> Mapping[str, Schema]:
    return schema.get("properties") or {}


def _without(value: Any, path: str, left_out: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without(inner, f"{path}.{key}", left_out)
            for key, inner in value.items()
            if not _is_left_out(inner, f"{path}.{key}", left_out)
        }
    if isinstance(value, (list, tuple)):
        items = f"{path}[]"
        return [_without(v, items, left_out) for v in value if not _is_left_out(v, items, left_out)]
    return value


def _is_left_out(value: Any, path: str, left_out: frozenset[str]) -> bool:
    return path in left_out or (isinstance(value, str) and f"{path}={value}" in left_out)


def _is_below(path: str, fields: Collection[str]) -> bool:
    """Whether it is one of these fields, or below one."""
    return any(path == f or path.startswith((f"{f}.", f"{f}[", f"{f}=")) for f in fields)
