"""Names, labels and annotations of all that the operator makes. Pure.

Design: docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

import hashlib

from rekindle.topology.model import Slot

GROUP = "rekindle.dev"
VERSION = "v1alpha1"
PLURAL = "streamtopologies"
KIND = "StreamTopology"
API_VERSION = f"{GROUP}/{VERSION}"

FIELD_MANAGER = "rekindle-operator"
COORDINATOR_SLOT = "coordinator"
TOPOLOGY_KEY = "topology.json"  # of the ConfigMap of an accepted generation

LABEL_TOPOLOGY = f"{GROUP}/topology"
LABEL_GENERATION = f"{GROUP}/generation"
LABEL_OPERATOR = f"{GROUP}/operator"  # of the operator's own pods: their release
LABEL_ROLE = f"{GROUP}/role"
LABEL_SEGMENT = f"{GROUP}/segment"
LABEL_SEGMENT_NAME = f"{GROUP}/segment-name"
LABEL_PARTITION = f"{GROUP}/partition"
LABEL_REPLICA = f"{GROUP}/replica"
LABEL_INCARNATION = f"{GROUP}/incarnation"

ROLE_TASK = "task"
ROLE_COORDINATOR = "coordinator"

GATE = f"{GROUP}/awaiting-capacity"
ANNOTATION_OPENED = f"{GROUP}/opened-at"  # when the gate was opened, seconds since 1970
ANNOTATION_ATTEMPT = f"{GROUP}/attempt"  # how many before it no node took or started
ANNOTATION_TEMPLATE = f"{GROUP}/template"  # digest of what the pod was made from
ANNOTATION_SHAPE = f"{GROUP}/shape"  # digest of its spec, see `resources.shape`
ANNOTATION_REPORT = f"{GROUP}/report"  # of a coordinator's Lease: the report that is still true
ANNOTATION_ROLL = f"{GROUP}/roll"  # of a topology: replace running pods that are outdated
ANNOTATION_LOST = f"{GROUP}/lost-at"  # when the pod that this one replaces was lost

MAX_NAME = 63  # a pod's name is its host name


def object_name(*parts: str | int) -> str:
    """Join parts to a DNS label; what is too long is cut and ends in a hash of the whole."""
    name = "-".join(str(part) for part in parts).replace("_", "-").lower()
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9].rstrip('-')}-{digest}"


def config_name(topology: str, generation: int) -> str:
    return object_name(topology, f"g{generation}")


def coordinator_name(topology: str) -> str:
    """Of the ServiceAccount, Role, RoleBinding and Lease."""
    return object_name(topology, COORDINATOR_SLOT)


def token_name(topology: str, uid: str) -> str:
    """Of the Secret. With the UID, so that one of the topology that had the name before, which is
    about to be deleted with it, is never taken for this one's."""
    return object_name(topology, "token", uid[:8])


def coordinator_pod_name(topology: str, incarnation: int) -> str:
    return object_name(topology, COORDINATOR_SLOT, incarnation)


def task_pod_name(topology: str, segment_name: str, slot: Slot, incarnation: int) -> str:
    """Hyphens of the segment's name are doubled: else segment `b-c` of topology `a` and segment `c`
    of topology `a-b` would claim the same pods. So the last run of an odd number of hyphens before
    the slot ends the topology's name."""
    segment = segment_name.replace("_", "-").replace("-", "--")
    return object_name(topology, segment, slot.partition, slot.replica, incarnation)
