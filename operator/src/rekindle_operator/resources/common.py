"""What all created objects share: owner, labels; generation records. Pure.

Design: docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle import names
from rekindle.identity import PREVIOUS_TOKEN_VARIABLE, TOKEN_VARIABLE
from rekindle_operator.cluster.model import TopologyView

Manifest = dict[str, Any]  # a Kubernetes manifest, or a part of one; no manifest of checkpoints

TOPOLOGY_MOUNT = "/etc/rekindle"
DATA_MOUNT = "/var/lib/rekindle-task"

# By default, pods are evicted from a lost node after 300 s, which would disturb a recovery.
TOLERATE_LOST_NODE = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
    for key in ("not-ready", "unreachable")
]


def owner_reference(topology: TopologyView) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": topology.name,
        "uid": topology.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def prometheus_annotations(port: int) -> Manifest:
    """Annotations by which Prometheus finds the metrics of a pod."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }


def metadata(
    topology: TopologyView, name: str, labels: Mapping[str, str] | None = None
) -> Manifest:
    return {
        "name": name,
        "namespace": topology.namespace,
        "labels": {
            names.PART_OF_LABEL: names.PART_OF,
            names.LABEL_TOPOLOGY: topology.name,
            **(labels or {}),
        },
        "ownerReferences": [owner_reference(topology)],
    }


def generation_record(topology: TopologyView, default_image: str) -> Manifest:
    """The immutable ConfigMap of an accepted generation: what its tasks and coordinator run. It
    contains the image, so that an operator of another version replaces a lost pod by one of the
    same image.

    The origin of epochs is the creation time of the topology in all generations."""
    record = {
        "name": topology.name,
        "uid": topology.uid,
        "generation": topology.generation,
        "origin": topology.creation_timestamp,
        "image": topology.spec.get("image") or default_image,
        "spec": topology.spec,
    }
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return record_manifest(topology, topology.generation, text)


def record_manifest(topology: TopologyView, generation: int, text: str) -> Manifest:
    """With the data of a generation record."""
    labels = {names.LABEL_GENERATION: str(generation)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(
            topology, names.generation_record_name(topology.name, generation), labels
        ),
        "immutable": True,
        "data": {names.TOPOLOGY_KEY: text},
    }


def digest_of_parts(parts: Mapping[str, Any]) -> str:
    """Digest of `parts` as JSON. A pod's template digest is that of what it is made from, except
    what identifies the single pod: one with another digest is outdated."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pod_security_context() -> Manifest:
    """Of a pod. The images have a numeric user, as the kubelet needs it to check
    `runAsNonRoot`."""
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security_context() -> Manifest:
    """Of a container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def store_volumes(checkpoint: Mapping[str, Any]) -> tuple[list[Manifest], list[Manifest]]:
    """(volumes, mounts) of `checkpoint.volume`, a claim that all tasks can mount (RWX)."""
    claim = checkpoint.get("volume")
    if not claim:
        return [], []
    volume = {"name": "store", "persistentVolumeClaim": {"claimName": claim}}
    return [volume], [{"name": "store", "mountPath": names.VOLUME_MOUNT}]


def secret_volumes(secrets: Sequence[str]) -> tuple[list[Manifest], list[Manifest]]:
    """(volumes, mounts) of Secrets whose keys a container reads as files. One that does not exist
    does not keep the pod from starting: the task says what is missing."""
    volumes, mounts = list[Manifest](), list[Manifest]()
    for number, secret in enumerate(secrets):
        name, path = f"rekindle-secret-{number}", f"{names.SECRETS_MOUNT}/{secret}"
        volumes.append({"name": name, "secret": {"secretName": secret, "optional": True}})
        mounts.append({"name": name, "mountPath": path, "readOnly": True})
    return volumes, mounts


def token_variables(topology: TopologyView) -> list[Manifest]:
    """The topology's token, and that of pods made before it was replaced, as environment variables
    of a container."""
    name = names.token_secret_name(topology.name, topology.uid)
    token = {"name": name, "key": names.TOKEN_KEY}
    previous = {"name": name, "key": names.RUNNING_TOKEN_KEY, "optional": True}
    return [
        {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": token}},
        {"name": PREVIOUS_TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": previous}},
    ]


def store_credentials(checkpoint: Mapping[str, Any]) -> list[Manifest]:
    """`envFrom` of `checkpoint.secretRef`: each key of the Secret becomes a variable."""
    secret = checkpoint.get("secretRef")
    return [{"secretRef": {"name": secret}}] if secret else []
