"""A pod as the API server lists it."""

from __future__ import annotations

from typing import Any


def pod(name: str, version: int, **spec: Any) -> dict[str, Any]:
    meta = {
        "namespace": "default",
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {"long": "x" * 50},  # which the informer is not to keep
    }
    return {"metadata": meta, "spec": {"nodeSelector": {"disk": "fast"}, **spec}}
