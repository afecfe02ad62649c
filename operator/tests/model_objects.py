"""Conversion between the model cluster's views and JSON objects of the API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rekindle.names import ANNOTATION_ROLL, KIND, LABEL_TOPOLOGY
from rekindle_operator.cluster.model import LeaseView, NodeView, TopologyView


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def node_json(node: NodeView) -> dict[str, Any]:
    ready = {
        "type": "Ready",
        "status": "True" if node.ready else "Unknown",
        "lastTransitionTime": rfc3339(node.readiness_changed_at),
    }
    meta = {
        "name": node.name,
        "uid": node.uid,
        "resourceVersion": str(node.version),
        "labels": dict(node.labels),
    }
    room = node.allocatable
    allocatable = {"cpu": f"{room.cpu_m}m", "memory": str(room.memory), "pods": str(room.pods)}
    allocatable |= {name: str(amount) for name, amount in room.others}
    taints = [{"key": t.key, "value": t.value, "effect": t.effect} for t in node.taints]
    spec = {"unschedulable": node.cordoned, "taints": taints}
    status = {"conditions": [ready], "allocatable": allocatable}
    return {"kind": "Node", "metadata": meta, "spec": spec, "status": status}


def lease_json(lease: LeaseView) -> dict[str, Any]:
    meta = {
        "namespace": lease.namespace,
        "name": lease.name,
        "labels": {LABEL_TOPOLOGY: lease.name.removesuffix("-coordinator")},
        "resourceVersion": str(lease.version),
    }
    return {"kind": "Lease", "metadata": meta, "spec": {"holderIdentity": lease.holder}}


def topology_json(view: TopologyView) -> dict[str, Any]:
    meta = {
        "namespace": view.namespace,
        "name": view.name,
        "uid": view.uid,
        "generation": view.generation,
        "creationTimestamp": view.creation_timestamp,
        "resourceVersion": str(view.version),
        **({"deletionTimestamp": view.creation_timestamp} if view.deleting else {}),
        **({"finalizers": list(view.finalizers)} if view.finalizers else {}),
        **({"annotations": {ANNOTATION_ROLL: "true"}} if view.roll else {}),
    }
    return {"kind": KIND, "metadata": meta, "spec": dict(view.spec), "status": dict(view.status)}
