"""The pods of standbys, and the patch that makes one of them the task of a slot. Pure.

A standby is the pod of a task without its slot: no gate, since it is made when there is room, and
no anti-affinity, since it is no replica. It can take the slots whose pods have the same template.
The patch writes the labels of the task and the slot in one request, which succeeds for one slot
alone: it demands that the pod is still a standby.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

import json

from rekindle import names
from rekindle.topology.model import Segment, Slot, Topology
from rekindle_operator.cluster.model import PodView, TopologyView
from rekindle_operator.resources.common import Manifest, digest_of_parts, metadata
from rekindle_operator.resources.merge import merge
from rekindle_operator.resources.task import (
    CONTAINER,
    merged_template,
    required_node_affinity,
    task_shape,
    with_variables,
)
from rekindle_operator.settings import PodDefaults

_VOLUME = "rekindle-slot"
_MOUNT = "/etc/rekindle-slot"
_FILE = "slot"
_WARM_UP_PROBES = 450
"""A busy node may take minutes to start Spark; a restart would only begin anew."""


def standby_template(
    view: TopologyView, topology: Topology, segment: Segment, defaults: PodDefaults
) -> str:
    """Digest of what pods of the segment are made from: a standby serves the segments with the same
    one."""
    merged = merged_template(view, topology, segment, generation=0, defaults=defaults)
    return digest_of_parts({"pod": merged, "conf": view.spec.get("sparkConf") or {}})


def standby_pod(
    view: TopologyView,
    topology: Topology,
    generation: int,
    segment: Segment,
    number: int,
    defaults: PodDefaults,
) -> Manifest:
    """For any node. `segment`: one whose template it has."""
    merged = merged_template(view, topology, segment, generation, defaults)
    name = names.standby_pod_name(view.name, generation, number)
    identity = {names.LABEL_ROLE: names.ROLE_STANDBY, names.LABEL_GENERATION: str(generation)}
    meta = metadata(view, name, identity)
    own = merged.get("metadata") or {}
    meta["labels"] = {**(own.get("labels") or {}), **meta["labels"]}
    meta["annotations"] = {
        **(own.get("annotations") or {}),
        names.ANNOTATION_TEMPLATE: standby_template(view, topology, segment, defaults),
        names.ANNOTATION_SHAPE: task_shape(view, merged["spec"]),
        names.ANNOTATION_SLOT: "",
    }
    field = f"metadata.annotations['{names.ANNOTATION_SLOT}']"
    item = {"path": _FILE, "fieldRef": {"fieldPath": field}}
    first = Slot(segment.id, partition=0, replica=0)
    spec = merge(
        with_variables(merged["spec"], view, first, incarnation=0),
        {
            "volumes": [{"name": _VOLUME, "downwardAPI": {"items": [item]}}],
            "containers": [
                {
                    "name": CONTAINER,
                    "env": [{"name": "REKINDLE_SLOT_FILE", "value": f"{_MOUNT}/{_FILE}"}],
                    "volumeMounts": [{"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}],
                }
            ],
        },
    )
    for container in spec["containers"]:  # a task passes its startup probe before Spark has started
        if container["name"] == CONTAINER and (probe := container.get("startupProbe")):
            container["startupProbe"] = {**probe, "failureThreshold": _WARM_UP_PROBES}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def on_node(standby: Manifest, node: str) -> Manifest:
    """The pod, for a node that has room for it; the scheduler may take no other."""
    spec = standby["spec"]
    affinity = required_node_affinity(spec.get("affinity") or {}, node)
    return {**standby, "spec": {**spec, "affinity": affinity}}


def slot_text(slot: Slot, incarnation: int) -> str:
    """The annotation that names the slot to the task."""
    return json.dumps(
        {
            "segment": slot.segment,
            "partition": slot.partition,
            "replica": slot.replica,
            "incarnation": incarnation,
        }
    )


def give_slot_patch(pod: PodView, task: Manifest, slot: Slot, incarnation: int) -> list[Manifest]:
    """JSON patch. `task`: the pod that would be created for the slot, whose labels and annotations
    the standby gets. Its tests fail if it is another pod, or no standby any more."""
    given = {**task["metadata"]["annotations"], names.ANNOTATION_SLOT: slot_text(slot, incarnation)}
    return [
        {"op": "test", "path": "/metadata/uid", "value": pod.uid},
        {"op": "test", "path": _path("labels", names.LABEL_ROLE), "value": names.ROLE_STANDBY},
        *_set("labels", task["metadata"]["labels"]),
        *_set("annotations", given),
    ]


def _set(field: str, values: Manifest) -> list[Manifest]:
    return [
        {"op": "add", "path": _path(field, key), "value": value}
        for key, value in sorted(values.items())
    ]


def _path(field: str, key: str) -> str:
    return f"/metadata/{field}/{key.replace('~', '~0').replace('/', '~1')}"
