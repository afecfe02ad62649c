"""The coordinator's pod. Pure.

It has no scheduling gate and is not part of a plan: the scheduler places it at once, on any node
that is not known to be lost. A coordinator pod that was not bound is replaced when its template
changes, since the nodes that it avoids were fixed when it was created.

Design: docs/design/recovery.md#replacement.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle import names
from rekindle.protocol import CONTROL_PORT
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.resources.common import (
    TOLERATE_LOST_NODE,
    Manifest,
    container_security_context,
    digest_of_parts,
    metadata,
    pod_security_context,
    prometheus_annotations,
    store_credentials,
    store_volumes,
    token_variables,
)
from rekindle_operator.resources.merge import merge
from rekindle_operator.resources.shape import shape_of
from rekindle_operator.resources.task import CONTAINER as TASK_CONTAINER
from rekindle_operator.resources.template_for_coordinator import (
    required_nodes,
    template_metadata,
    with_template_parts,
)
from rekindle_operator.settings import PodDefaults

RESOURCES = {"requests": {"cpu": "50m", "memory": "160Mi"}, "limits": {"memory": "512Mi"}}
"""Where neither the chart nor the topology says otherwise."""


def coordinator_pod(
    topology: TopologyView,
    incarnation: int,
    excluded: Iterable[str],
    defaults: PodDefaults,
    *,
    last_resort: Iterable[str] = (),
) -> Manifest:
    """`excluded`: nodes that take no coordinator. `last_resort`: nodes on which its
    predecessors failed or became silent. They may be good, and the only ones with capacity."""
    spec = _spec(topology, excluded, defaults)
    digest = digest_of_parts(spec)
    container = spec["containers"][0]
    spec["containers"] = [merge(container, {"env": _environment(topology, incarnation)})]
    if nodes := sorted(set(last_resort)):
        spec["affinity"] = merge(
            spec.get("affinity") or {}, {"nodeAffinity": _preferably_not(nodes)}
        )
    labels = {
        names.LABEL_ROLE: names.ROLE_COORDINATOR,
        names.LABEL_INCARNATION: str(incarnation),
    }
    name = names.coordinator_pod_name(topology.name, incarnation)
    meta = metadata(topology, name, labels)
    more_labels, annotations = template_metadata(topology.spec.get("podTemplate") or {})
    meta["labels"] = {**more_labels, **meta["labels"]}
    own = {
        names.ANNOTATION_TEMPLATE: digest,
        names.ANNOTATION_SHAPE: coordinator_shape(topology, defaults),
        names.ANNOTATION_IMAGE: container["image"],
    }
    meta["annotations"] = {**prometheus_annotations(CONTROL_PORT), **annotations, **own}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def coordinator_template_digest(
    topology: TopologyView, excluded: Iterable[str], defaults: PodDefaults
) -> str:
    """The template digest of a coordinator that would be created now."""
    return digest_of_parts(_spec(topology, excluded, defaults))


def coordinator_shape(topology: TopologyView, defaults: PodDefaults) -> str:
    """The shape of its pod, for nodes that refuse it."""
    spec = _spec(topology, (), defaults)
    del spec["serviceAccountName"]  # differs for each topology
    return shape_of(topology.namespace, spec)


def _spec(topology: TopologyView, excluded: Iterable[str], defaults: PodDefaults) -> Manifest:
    checkpoint = topology.spec.get("checkpoint") or {}
    volumes, mounts = store_volumes(checkpoint)
    spec: Manifest = {
        "restartPolicy": "Always",
        "serviceAccountName": names.coordinator_name(topology.name),
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": 10,
        "tolerations": list(TOLERATE_LOST_NODE),
        "volumes": volumes,
        "securityContext": pod_security_context(),
        "containers": [
            {
                "name": "coordinator",
                "image": topology.spec.get("image") or defaults.image,
                "imagePullPolicy": defaults.pull_policy,
                "args": ["python", "-m", "rekindle.coordinator"],
                "env": [],
                "envFrom": store_credentials(checkpoint),
                "volumeMounts": mounts,
                "resources": _resources(topology, defaults),
                "ports": [{"name": "control", "containerPort": CONTROL_PORT}],
                "livenessProbe": {
                    "httpGet": {"path": "/livez", "port": CONTROL_PORT},
                    "initialDelaySeconds": 10,
                    "timeoutSeconds": 5,
                    "failureThreshold": 6,
                },
                "readinessProbe": {
                    "httpGet": {"path": "/readyz", "port": CONTROL_PORT},
                    "periodSeconds": 2,
                },
                "securityContext": container_security_context(),
            }
        ],
    }
    if secrets := topology.spec.get("imagePullSecrets"):
        spec["imagePullSecrets"] = list(secrets)
    template = topology.spec.get("podTemplate") or {}
    spec = with_template_parts(spec, template, TASK_CONTAINER)
    # matchFields allows one value for each requirement; requirements of a term are ANDed.
    if nodes := required_nodes(template, [_not_node(node) for node in sorted(set(excluded))]):
        spec["affinity"] = {"nodeAffinity": nodes}
    return spec


def _resources(topology: TopologyView, defaults: PodDefaults) -> Manifest:
    """Each amount is the topology's, else the chart's, else the default."""
    of_topology = (topology.spec.get("coordinator") or {}).get("resources") or {}
    levels = (RESOURCES, defaults.coordinator_resources, of_topology)
    return {
        part: {name: amount for level in levels for name, amount in (level.get(part) or {}).items()}
        for part in ("requests", "limits")
    }


def _environment(topology: TopologyView, incarnation: int) -> list[Manifest]:
    return [
        {"name": "REKINDLE_TOPOLOGY", "value": topology.name},
        {"name": "REKINDLE_NAMESPACE", "value": topology.namespace},
        {"name": "REKINDLE_TOPOLOGY_UID", "value": topology.uid},
        {"name": "REKINDLE_INCARNATION", "value": str(incarnation)},
        {"name": "REKINDLE_BIND", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *token_variables(topology),
    ]


def _preferably_not(nodes: list[str]) -> Manifest:
    term = {"weight": 100, "preference": {"matchFields": [_not_node(node) for node in nodes]}}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [term]}


def _not_node(node: str) -> Manifest:
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}
