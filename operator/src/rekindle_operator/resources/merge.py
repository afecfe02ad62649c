"""Merging `podTemplate` into the pods that the operator renders. Pure.

A strategic merge as `kubectl apply` users know it: objects merge by field, lists of named things by
their key, tolerations and the like add up, other lists and scalars are the template's. What makes a
task a task (its labels, identity variables, gate, anti-affinity) is put on afterwards and wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = {
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
    """A new object: `base` with `patch` over it. A null in the patch takes the field away."""
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
        if key in _KEYS:
            return _merge_list(old, new, _KEYS[key])
        if key in _APPENDED:
            return old + [item for item in new if item not in old]
    return new


def _merge_list(old: list[Any], new: list[Any], key: str) -> list[Any]:
    merged = list(old)
    places = {item.get(key): i for i, item in enumerate(merged) if isinstance(item, Mapping)}
    for item in new:
        place = places.get(item.get(key)) if isinstance(item, Mapping) else None
        if place is None:
            merged.append(item)
        else:
            merged[place] = merge(merged[place], item)
    return merged
