"""The downward API: fieldRef and resourceFieldRef.

Pure.  Shared by environment variables and downwardAPI volumes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle_testing.embedded.process_node import quantities

Json = dict[str, Any]

_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class FieldError(ValueError):
    """A reference to a field that does not exist, or that this node does not support."""


@dataclass(frozen=True, slots=True)
class DownwardValues:
    """Values of the downward API that are not in the pod's object."""

    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str]


def field_value(pod: Json, path: str, downward_values: DownwardValues) -> str:
    meta, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.fullmatch(path):
        values: dict[str, str] = meta.get(match[1]) or {}
        return values.get(match[2], "")
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(meta[path.removeprefix("metadata.")])
        case "metadata.labels" | "metadata.annotations":
            values = meta.get(path.removeprefix("metadata.")) or {}
            return "\n".join(f"{key}={_quote(value)}" for key, value in sorted(values.items()))
        case "spec.nodeName":
            return str(spec["nodeName"])
        case "spec.serviceAccountName":
            return str(spec.get("serviceAccountName", "default"))
        case "status.podIP" | "status.podIPs":
            return downward_values.pod_ip
        case "status.hostIP" | "status.hostIPs":
            return downward_values.host_ip
    raise FieldError(f"fieldRef {path!r} is not supported by a process node")


def resource_value(
    pod: Json, reference: Json, default_container: str, downward_values: DownwardValues
) -> str:
    """`limits.X` falls back on the allocatable of the node, `requests.X` on the limit and then
    0."""
    name = reference.get("containerName") or default_container
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
    found = [c for c in containers if c["name"] == name]
    if not found:
        raise FieldError(f"resourceFieldRef names container {name!r}, which the pod does not have")
    kind, _, resource = reference["resource"].partition(".")
    resources: Json = found[0].get("resources") or {}
    limit = (resources.get("limits") or {}).get(resource)
    match kind:
        case "limits":
            text = limit or downward_values.allocatable.get(resource, "0")
        case "requests":
            text = (resources.get("requests") or {}).get(resource) or limit or "0"
        case _:
            raise FieldError(f"resourceFieldRef {reference['resource']!r} is not supported")
    divisor = quantities.parse(reference.get("divisor") or "1")
    # An absent divisor arrives as "0".
    return str(quantities.ceil_divide(quantities.parse(text), divisor or quantities.parse("1")))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
