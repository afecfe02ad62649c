"""Merging `podTemplate` into the pods that the operator renders. Pure.

A strategic merge like that of `kubectl patch`: objects are merged by field and keyed lists by key,
tolerations and the like are appended, other lists and scalars are replaced by the template's. A
task's own labels, variables, gate and anti-affinity are added afterwards and take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
_APPENDED = frozenset(
    {
        "tolerations",
        "envFrom",
        "topologySpreadConstraints",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution",
    }
)


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A new object: `base` changed by `patch`. A null in the patch removes the field."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return merge(old, new)
    if isinstance(old, list) and isinstance(new, list):
        if key in _MERGE_KEYS:
            return _merge_list(old, new, _MERGE_KEYS[key])
        if key in _APPENDED:
            return old + [item for item in new if item not in old]
    return new


def _merge_list(old: list[Any], new: list[Any], key: str) -> list[Any]:
    merged = list(old)
    index_of = {item.get(key): i for i, item in enumerate(merged) if isinstance(item, Mapping)}
    for item in new:
        index = index_of.get(item.get(key)) if isinstance(item, Mapping) else None
        if index is None:
            merged.append(item)
        else:
            merged[index] = merge(merged[index], item)
    return merged
