"""Kubernetes objects from and to the coordinator's types: pods, generations, the Lease, the status.

Pure. Labels and names are those of docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle import names
from rekindle.coordinator.model import Generation, Pod
from rekindle.errors import RekindleError
from rekindle.report import Report, report_json
from rekindle.topology.model import Slot, Topology

Json = dict[str, Any]


class ObjectError(RekindleError):
    """An object in the cluster is not as written by the operator; names the object."""


def pod_from(document: Mapping[str, Any], uid: str) -> Pod | None:
    """None for a pod without a slot in its labels, and for a pod of another topology: pods of an
    older topology of the same name may still be terminating."""
    meta, status = document["metadata"], document.get("status") or {}
    if uid not in (owner.get("uid") for owner in meta.get("ownerReferences") or ()):
        return None
    labels = meta.get("labels") or {}
    try:
        slot = Slot(
            labels[names.LABEL_SEGMENT],
            int(labels[names.LABEL_PARTITION]),
            int(labels[names.LABEL_REPLICA]),
        )
        incarnation = int(labels[names.LABEL_INCARNATION])
    except (KeyError, ValueError):
        return None
    address = status.get("podIP") or None
    ended = status.get("phase") in ("Succeeded", "Failed")
    containers = status.get("containerStatuses") or []
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
    started = any(c.get("started") and c.get("name") == names.TASK_CONTAINER for c in containers)
    return Pod(
        name=meta["name"],
        slot=slot,
        incarnation=incarnation,
        address=address,
        may_be_running=address is not None and not ended,
        was_ready=started or conditions.get("Ready") == "True",
        node=(document.get("spec") or {}).get("nodeName") or None,
    )


def generations_from(
    config_maps: Iterable[Mapping[str, Any]], uid: str
) -> dict[int, tuple[str, Json]]:
    """Number -> (name, spec) of the generations of the topology with this uid."""
    found: dict[int, tuple[str, Json]] = {}
    for document in config_maps:
        text = (document.get("data") or {}).get(names.TOPOLOGY_KEY)
        if text is None:
            continue
        try:
            topology = json.loads(text)
            if topology["uid"] == uid:
                found[int(topology["generation"])] = (str(topology["name"]), topology["spec"])
        except (ValueError, KeyError, TypeError) as error:
            name = document["metadata"]["name"]
            raise ObjectError(f"ConfigMap {name}: {names.TOPOLOGY_KEY}: {error!r}") from error
    return found


def newest_generation(compiled: Mapping[int, Topology]) -> Generation:
    """`compiled` has at least one generation."""
    operator_ids = {
        segment.id: tuple(topology.nodes[name].id for name in segment.nodes)
        for topology in compiled.values()
        for segment in topology.segments
    }
    newest = max(compiled)
    return Generation(newest, compiled[newest], operator_ids)


def status_patch(namespace: str, name: str, uid: str, report: Report) -> Json:
    """With the uid, the API server refuses it (409) for another topology of the same name."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "status": {"dataPlane": report_json(report)},
    }


def lease(
    namespace: str,
    topology: str,
    uid: str,
    incarnation: int,
    duration_s: int,
    now: str,
    report: int | None,
) -> Json:
    """`report`: the number of the write of the status (`StatusWriter.writes`) that is up to date;
    None: a newer report is not written yet."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": names.coordinator_name(topology),
            "namespace": namespace,
            "labels": {names.LABEL_TOPOLOGY: topology},
            "annotations": {names.ANNOTATION_REPORT: "none" if report is None else str(report)},
            "ownerReferences": [
                {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": topology, "uid": uid}
            ],
        },
        "spec": {
            "holderIdentity": str(incarnation),
            "leaseDurationSeconds": duration_s,
            "acquireTime": now,
            "renewTime": now,
        },
    }


def holder(document: Mapping[str, Any]) -> int:
    """The incarnation that holds a Lease; -1 if no coordinator does."""
    identity = str((document.get("spec") or {}).get("holderIdentity") or "")
    return int(identity) if identity.isdecimal() else -1
