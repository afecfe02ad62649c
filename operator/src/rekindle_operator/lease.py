"""Conversion between the operator's Lease in the API and `election.LeaseRecord`. Pure.

Standard library only: the watchdog uses it too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rekindle.names import ANNOTATION_HOLDER_PROCESS
from rekindle_operator.election import LeaseRecord

_RELEASED_S = 1  # duration of a Lease without a holder; the API server refuses 0


def lease_path(namespace: str, name: str = "") -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    return f"{path}/{name}" if name else path


def read_lease(raw: Mapping[str, Any]) -> LeaseRecord:
    meta, spec = raw["metadata"], raw.get("spec") or {}
    return LeaseRecord(
        holder=str(spec.get("holderIdentity") or ""),
        process=str((meta.get("annotations") or {}).get(ANNOTATION_HOLDER_PROCESS, "")),
        lease_s=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(meta["resourceVersion"]),
        uid=str(meta.get("uid", "")),
    )


def lease_body(
    namespace: str,
    name: str,
    record: LeaseRecord,
    now: float,
    acquired: float,
    owners: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Body to create the Lease (no version), or to replace it if its version is still the same.
    `now`, `acquired`: seconds since 1970, for people; no decision depends on them. `owners`:
    references to the objects with which the Lease is deleted."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "annotations": {ANNOTATION_HOLDER_PROCESS: record.process},
    }
    if record.version:
        metadata["resourceVersion"] = record.version
    if references := [dict(owner) for owner in owners]:
        metadata["ownerReferences"] = references
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, int(record.lease_s)),
            "leaseTransitions": record.transitions,
            "acquireTime": _micro_time(acquired),
            "renewTime": _micro_time(now),
        },
    }


def deployment_path(namespace: str, name: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"


def owner_reference(deployment: Mapping[str, Any]) -> dict[str, Any]:
    meta = deployment["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": meta["name"],
        "uid": meta["uid"],
    }


def released(record: LeaseRecord) -> LeaseRecord:
    """The record without a holder."""
    return LeaseRecord("", "", _RELEASED_S, record.transitions, record.version, record.uid)


def _micro_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
