"""Digest of what the scheduler and kubelets see of a pod. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle_operator.resources.common import digest_of_parts


def shape_of(namespace: str, spec: Mapping[str, Any], conf: Mapping[str, Any] | None = None) -> str:
    """Pods of one shape are refused by the same nodes and fail in the same way. The whole spec
    counts: a Secret, a volume, a variable, a probe or a command may prevent a container's start,
    and an edit that corrects it makes a new shape. `spec` does not contain what identifies one pod
    or one topology (its gate, its record, its replica); `conf`: Spark's configuration."""
    return digest_of_parts({"namespace": namespace, "spec": spec, "conf": conf or {}})
