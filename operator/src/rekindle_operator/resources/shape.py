"""What tells one kind of pod from another for scheduler and kubelet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle_operator.resources.common import template_digest


def shape_of(namespace: str, spec: Mapping[str, Any], conf: Mapping[str, Any] | None = None) -> str:
    """Pods of one shape are refused by the same nodes and fail in the same way. All of the spec
    counts: a Secret, a volume, a variable, a probe or a command may be why a container does not
    start, and then an edit that corrects it begins anew. `spec` is without what names one pod or
    one topology (its gate, its record, its place among replicas); `conf`: Spark's."""
    return template_digest({"namespace": namespace, "spec": spec, "conf": conf or {}})
