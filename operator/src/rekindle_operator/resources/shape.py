"""What tells one kind of pod from another for scheduler and kubelet. Pure.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle_operator.resources.common import template_digest

_OF_POD = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "schedulerName",
    "runtimeClassName",
    "priorityClassName",
    "hostNetwork",
    "securityContext",
    "resources",
    "overhead",
    "imagePullSecrets",
    "volumes",
)
_OF_CONTAINER = ("image", "resources", "ports", "restartPolicy", "command", "securityContext")
_OF_ANY_NODE = ("emptyDir", "configMap", "secret", "downwardAPI", "projected")


def shape_of(namespace: str, spec: Mapping[str, Any]) -> str:
    """Pods of one shape are refused by the same nodes: same requests, selectors, host ports, claims
    and images. `spec` is without what names one pod, as its gate and its place among replicas."""
    parts: dict[str, Any] = {key: spec[key] for key in _OF_POD if spec.get(key)}
    parts["volumes"] = [
        {key: value for key, value in volume.items() if key != "name"}
        for volume in spec.get("volumes") or ()
        if not any(kind in volume for kind in _OF_ANY_NODE)
    ]
    parts["containers"] = [
        {key: container[key] for key in _OF_CONTAINER if container.get(key)}
        for kind in ("initContainers", "containers")
        for container in spec.get(kind) or ()
    ]
    return template_digest({"namespace": namespace, **parts})
