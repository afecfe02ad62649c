"""The pods of tasks, and the patch that opens their gates. Pure.

A task pod is created with a scheduling gate: gates can be removed, but not added. Opening a gate is
one JSON patch that removes it and requires the node that the plan has chosen.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle import names
from rekindle.protocol import CONTROL_PORT, STREAM_PORT
from rekindle.quantities import parse_quantity
from rekindle.topology.model import Segment, Slot, Topology
from rekindle.topology.resources import task_limits
from rekindle.topology.spec import SourceSpec
from rekindle_operator.cluster.model import PodView, TopologyView
from rekindle_operator.resources.common import (
    DATA_MOUNT,
    TOLERATE_LOST_NODE,
    TOPOLOGY_MOUNT,
    Manifest,
    container_security_context,
    digest_of_parts,
    metadata,
    pod_security_context,
    prometheus_annotations,
    secret_volumes,
    store_credentials,
    store_volumes,
    token_variables,
)
from rekindle_operator.resources.merge import merge
from rekindle_operator.resources.shape import shape_of
from rekindle_operator.settings import PodDefaults

CONTAINER = names.TASK_CONTAINER
GRACE_S = 60
_TOPOLOGY_VOLUME = "topology"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREPARED_SOURCES_BYTES = 1024**3  # copies of `files` sources, on the volume of the output log


def task_pod(
    view: TopologyView,
    topology: Topology,
    generation: int,
    slot: Slot,
    incarnation: int,
    defaults: PodDefaults,
    *,
    predecessor_lost_at: float | None = None,
    failed_placements: int = 0,
    replaces: str = "",
    on_node: str = "",
) -> Manifest:
    """`view`: owner and spec of the accepted generation. `topology`: the same, compiled.
    `replaces`: the pod that it is to replace on `on_node`, in a move to an emptier node."""
    segment = topology.segment(slot.segment)
    merged = merged_template(view, topology, segment, generation, defaults)
    identity = {
        names.LABEL_ROLE: names.ROLE_TASK,
        names.LABEL_GENERATION: str(generation),
        names.LABEL_SEGMENT: slot.segment,
        names.LABEL_SEGMENT_NAME: names.object_name(segment.name),
        names.LABEL_PARTITION: str(slot.partition),
        names.LABEL_REPLICA: str(slot.replica),
        names.LABEL_INCARNATION: str(incarnation),
    }
    name = names.task_pod_name(view.name, segment.name, slot.partition, slot.replica, incarnation)
    meta = metadata(view, name, identity)
    merged_metadata = merged.get("metadata") or {}
    meta["labels"] = {**(merged_metadata.get("labels") or {}), **meta["labels"]}
    annotations = dict(merged_metadata.get("annotations") or {})
    annotations[names.ANNOTATION_TEMPLATE] = task_template_digest(view, topology, segment, defaults)
    annotations[names.ANNOTATION_SHAPE] = task_shape(view, merged["spec"])
    if predecessor_lost_at is not None:
        annotations[names.ANNOTATION_LOST] = f"{predecessor_lost_at:.3f}"
    if failed_placements:
        annotations[names.ANNOTATION_FAILED_PLACEMENTS] = str(failed_placements)
    if replaces:
        annotations[names.ANNOTATION_REPLACES] = replaces
    meta["annotations"] = annotations
    spec = merge(
        with_variables(merged["spec"], view, slot, incarnation),
        {
            "schedulingGates": [{"name": names.GATE}],
            "affinity": {"podAntiAffinity": {_REQUIRED: [_anti_affinity_term(view, slot)]}},
        },
    )
    if on_node:
        spec["affinity"] = required_node_affinity(spec["affinity"], on_node)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def task_shape(view: TopologyView, spec: Manifest) -> str:
    """Without the ConfigMap, whose name is different in each generation."""
    volumes = [v for v in spec["volumes"] if v["name"] != _TOPOLOGY_VOLUME]
    return shape_of(view.namespace, {**spec, "volumes": volumes}, view.spec.get("sparkConf"))


def task_template_digest(
    view: TopologyView, topology: Topology, segment: Segment, defaults: PodDefaults
) -> str:
    """Digest of all that an edit can change for tasks of this segment (its id covers what its nodes
    compute). Without the generation's number: an edit of a priority does not affect tasks."""
    merged = merged_template(view, topology, segment, generation=0, defaults=defaults)
    parts: dict[str, Any] = {"pod": merged, "conf": view.spec.get("sparkConf") or {}}
    if topology.spec.max_delay is not None:  # else these values do not matter
        availability = topology.spec.availability.model_dump()
        parts["consistency"] = [topology.spec.max_delay, availability]
        if segment.blocks:
            parts["blocks"] = True
    first = topology.nodes[segment.nodes[0]].spec
    if isinstance(first, SourceSpec) and (applied := first.kind[1].applied_to_new_pods):
        parts["source"] = applied
    return digest_of_parts(parts)


def merged_template(
    view: TopologyView, topology: Topology, segment: Segment, generation: int, defaults: PodDefaults
) -> Manifest:
    """Metadata and spec of the segment's pods, without what identifies one of them."""
    template = view.spec.get("podTemplate") or {}
    base = {
        "metadata": {"annotations": prometheus_annotations(CONTROL_PORT)},
        "spec": _base_spec(view, topology, segment, generation, defaults),
    }
    return merge(base, {k: v for k, v in template.items() if k in ("spec", "metadata")})


def _base_spec(
    view: TopologyView, topology: Topology, segment: Segment, generation: int, defaults: PodDefaults
) -> Manifest:
    checkpoint = view.spec.get("checkpoint") or {}
    volumes, mounts = store_volumes(checkpoint)
    of_secrets, secret_mounts = secret_volumes(_secrets(topology, segment))
    scratch = {"sizeLimit": str(2 * topology.spec.log_budget + _PREPARED_SOURCES_BYTES)}
    generation_record = {"name": names.generation_record_name(view.name, generation)}
    spec: Manifest = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "tolerations": list(TOLERATE_LOST_NODE),
        "securityContext": pod_security_context(),
        "volumes": [
            {"name": _TOPOLOGY_VOLUME, "configMap": generation_record},
            {"name": "data", "emptyDir": scratch},
            *volumes,
            *of_secrets,
        ],
        "containers": [
            {
                "name": CONTAINER,
                "image": view.spec.get("image") or defaults.image,
                "imagePullPolicy": defaults.pull_policy,
                "args": ["python", "-m", "rekindle.task"],
                "env": [],
                "envFrom": store_credentials(checkpoint),
                "ports": [
                    {"name": "flight", "containerPort": STREAM_PORT},
                    {"name": "control", "containerPort": CONTROL_PORT},
                ],
                "volumeMounts": [
                    {"name": _TOPOLOGY_VOLUME, "mountPath": TOPOLOGY_MOUNT, "readOnly": True},
                    {"name": "data", "mountPath": DATA_MOUNT},
                    *mounts,
                    *secret_mounts,
                ],
                "resources": _resources(view, segment),
                "securityContext": container_security_context(),
                **_probes(),
            }
        ],
    }
    if secrets := view.spec.get("imagePullSecrets"):
        spec["imagePullSecrets"] = list(secrets)
    if defaults.priority_class:
        spec["priorityClassName"] = defaults.priority_class
    if account := view.spec.get("serviceAccountName"):
        spec["serviceAccountName"] = account
    return spec


def _secrets(topology: Topology, segment: Segment) -> list[str]:
    """Names of those that the segment's source and sinks read."""
    found = set[str]()
    for name in segment.nodes:
        if isinstance(node := topology.nodes[name].spec, SourceSpec):
            found.update(node.kind[1].secrets)
    for query in topology.spec.queries:
        if query.name in segment.queries:
            found.update(query.sink.kind[1].secrets)
    return sorted(found)


def _resources(view: TopologyView, segment: Segment) -> Manifest:
    """Requests as in the plan. Limits are those of the segment's nodes, or the topology's."""
    requests = {"cpu": f"{segment.resources.cpu_m}m", "memory": str(segment.resources.memory_bytes)}
    nodes = [n for kind in ("sources", "operators") for n in view.spec.get(kind) or ()]
    of_nodes = (n.get("resources") for n in nodes if n.get("name") in segment.nodes)
    limits = task_limits(of_nodes, view.spec.get("resources") or {}, requests)
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _probes() -> Manifest:
    def get(path: str) -> Manifest:
        return {"httpGet": {"path": path, "port": CONTROL_PORT}}

    # A JVM starts slowly on a slow node. Liveness is about the process, not about its inputs.
    return {
        "startupProbe": get("/startupz") | {"periodSeconds": 2, "failureThreshold": 90},
        "livenessProbe": get("/livez")
        | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": get("/readyz") | {"periodSeconds": 2, "timeoutSeconds": 2},
    }


def with_variables(spec: Manifest, view: TopologyView, slot: Slot, incarnation: int) -> Manifest:
    """With the environment of a task."""
    env = [
        {"name": "REKINDLE_TOPOLOGY_FILE", "value": f"{TOPOLOGY_MOUNT}/{names.TOPOLOGY_KEY}"},
        {"name": "REKINDLE_SEGMENT", "value": slot.segment},
        {"name": "REKINDLE_PARTITION", "value": str(slot.partition)},
        {"name": "REKINDLE_REPLICA", "value": str(slot.replica)},
        {"name": "REKINDLE_INCARNATION", "value": str(incarnation)},
        {"name": "REKINDLE_BIND", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "REKINDLE_DATA", "value": DATA_MOUNT},
        *token_variables(view),
        *_memory(spec),
    ]
    return merge(spec, {"containers": [{"name": CONTAINER, "env": env}]})


def _memory(spec: Manifest) -> list[Manifest]:
    """REKINDLE_MEMORY: what the container may use, by which the task sizes its JVM and its calls.
    The downward API would give the node's memory if there is no limit."""
    container = next(c for c in spec["containers"] if c["name"] == CONTAINER)
    resources = [level.get("resources") or {} for level in (container, spec)]
    given = (level.get(part) or {} for part in ("limits", "requests") for level in resources)
    text = next((amounts["memory"] for amounts in given if "memory" in amounts), None)
    if text is None:
        return []
    return [{"name": "REKINDLE_MEMORY", "value": str(int(parse_quantity(text)))}]


def _anti_affinity_term(view: TopologyView, slot: Slot) -> Manifest:
    """Excludes nodes of other replicas of the partition, not of older incarnations of itself, under
    either number."""
    return {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchLabels": {
                names.LABEL_TOPOLOGY: view.name,
                names.LABEL_SEGMENT: slot.segment,
                names.LABEL_PARTITION: str(slot.partition),
            },
            "matchExpressions": [
                {
                    "key": names.LABEL_REPLICA,
                    "operator": "NotIn",
                    "values": sorted({str(slot.replica), str(slot.alternate.replica)}),
                }
            ],
        },
    }


def open_gate_patch(pod: PodView, node: str, now: float) -> list[Manifest]:
    """JSON patch. Its tests fail if the pod or its gate is another one than planned."""
    index = pod.gates.index(names.GATE)
    affinity = required_node_affinity(pod.affinity or {}, node)
    return [
        {"op": "test", "path": "/metadata/uid", "value": pod.uid},
        {"op": "test", "path": f"/spec/schedulingGates/{index}/name", "value": names.GATE},
        {"op": "remove", "path": f"/spec/schedulingGates/{index}"},
        {"op": "add", "path": "/spec/affinity", "value": affinity},
        {
            "op": "add",
            "path": "/metadata/annotations",
            "value": {**pod.annotations, names.ANNOTATION_OPENED: f"{now:.3f}"},
        },
    ]


def required_node_affinity(affinity: Mapping[str, Any], node: str) -> Manifest:
    """Adds the node as a requirement to each term that lacks it, since terms are ORed."""
    on_node = {"key": "metadata.name", "operator": "In", "values": [node]}
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    required = node_affinity.get(_REQUIRED) or {}
    terms = [dict(term) for term in required.get("nodeSelectorTerms") or [{}]]
    for term in terms:
        fields = term.get("matchFields") or []
        term["matchFields"] = fields if on_node in fields else [*fields, on_node]
    return {
        **affinity,
        "nodeAffinity": {**node_affinity, _REQUIRED: {"nodeSelectorTerms": terms}},
    }
