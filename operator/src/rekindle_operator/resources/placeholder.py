"""The pod by which a cluster autoscaler sees what a gated pod lacks. Pure.

It requests what the gated pod does, and what may run it may run the other one. It has the image
of the task, which a new node needs anyway, no token, no volumes, and no label of a topology: so it
is none of its pods for anything but the placeholders' own code. Its limits are what it requests: a
namespace may demand limits, or have lower ones by default, and huge pages and devices need them.

Design: docs/design/recovery.md#placeholders.
"""

from __future__ import annotations

from typing import Any

from rekindle import names
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.model import PodView, TopologyView
from rekindle_operator.resources.common import (
    Manifest,
    container_security_context,
    digest_of_parts,
    owner_reference,
    pod_security_context,
)
from rekindle_operator.settings import PodDefaults

CONTAINER = "placeholder"
_WAIT = "import signal; signal.pause()"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def placeholder_name(gated: PodView) -> str:
    return f"{gated.name}-placeholder"


def placeholder_pod(view: TopologyView, gated: PodView, defaults: PodDefaults) -> Manifest:
    """Of a topology, for one of its pods that waits for a node."""
    amounts = _quantities(gated.requests)
    tolerations: list[dict[str, Any]] = [
        {
            key: value
            for key, value in (
                ("key", each.key),
                ("operator", each.operator),
                ("value", each.value),
                ("effect", each.effect),
            )
            if value
        }
        for each in gated.tolerations
    ]
    spec: Manifest = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": pod_security_context(),
        "nodeSelector": dict(gated.node_selector),
        "tolerations": tolerations,
        "containers": [
            {
                "name": CONTAINER,
                "image": view.spec.get("image") or defaults.image,
                "imagePullPolicy": defaults.pull_policy,
                "args": ["python", "-c", _WAIT],
                "resources": {"requests": amounts, "limits": amounts},
                "securityContext": container_security_context(),
            }
        ],
    }
    labels = {names.PART_OF_LABEL: names.PART_OF, names.LABEL_ROLE: names.ROLE_PLACEHOLDER}
    affinity = dict(gated.affinity or {})
    if gated.slot is not None:
        partition = [view.uid, gated.slot.segment, gated.slot.partition]
        labels[names.LABEL_PLACEHOLDER_OF] = digest_of_parts({"partition": partition})
        affinity["podAntiAffinity"] = _apart_from_replicas(
            affinity.get("podAntiAffinity") or {}, labels[names.LABEL_PLACEHOLDER_OF]
        )
    if affinity:
        spec["affinity"] = affinity
    if secrets := view.spec.get("imagePullSecrets"):
        spec["imagePullSecrets"] = list(secrets)
    if defaults.placeholder_class:
        spec["priorityClassName"] = defaults.placeholder_class
    else:  # the cluster's default class may preempt tasks: then the API server refuses this
        spec["preemptionPolicy"] = "Never"
    meta: Manifest = {
        "name": placeholder_name(gated),
        "namespace": view.namespace,
        "labels": labels,
        "ownerReferences": [owner_reference(view)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _apart_from_replicas(anti_affinity: Manifest, partition: str) -> Manifest:
    """Also from the placeholders of other replicas of the partition, as these replicas need as many
    nodes."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {names.LABEL_PLACEHOLDER_OF: partition}},
    }
    return {**anti_affinity, _REQUIRED: [*(anti_affinity.get(_REQUIRED) or ()), term]}


def _quantities(requests: ResourceAmounts) -> dict[str, str]:
    named = {"cpu": f"{requests.cpu_m}m", "memory": str(requests.memory)}
    return named | {name: str(amount) for name, amount in requests.others}
