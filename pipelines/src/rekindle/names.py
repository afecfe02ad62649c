"""Names of Rekindle's resource, labels, annotations and objects in the Kubernetes API, and of what
its pods contain.

They are stored in clusters, and users select by them. Pure; standard library only.

Design: docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

import hashlib

GROUP = "rekindle.dev"
VERSION = "v1alpha1"
PLURAL = "streamtopologies"
KIND = "StreamTopology"
API_VERSION = f"{GROUP}/{VERSION}"

OPERATOR_FIELD_MANAGER = "rekindle-operator"
COORDINATOR_FIELD_MANAGER = "rekindle-coordinator"
OPERATOR_EVENT_REPORTER = f"{GROUP}/operator"  # `reportingController` of its Events
WATCHDOG_EVENT_REPORTER = f"{GROUP}/watchdog"

OWN_PREFIX = f"{GROUP}/"  # of all labels and annotations that follow

LABEL_TOPOLOGY = f"{GROUP}/topology"
LABEL_GENERATION = f"{GROUP}/generation"
LABEL_OPERATOR_DEPLOYMENT = f"{GROUP}/operator"  # of the operator's own pods: its Deployment
LABEL_ROLE = f"{GROUP}/role"
LABEL_SEGMENT = f"{GROUP}/segment"
LABEL_SEGMENT_NAME = f"{GROUP}/segment-name"
LABEL_PARTITION = f"{GROUP}/partition"
LABEL_REPLICA = f"{GROUP}/replica"
LABEL_INCARNATION = f"{GROUP}/incarnation"
LABEL_PLACEHOLDER_OF = f"{GROUP}/placeholder-of"  # digest of the partition that it stands for

ROLE_TASK = "task"
ROLE_COORDINATOR = "coordinator"
ROLE_STANDBY = "standby"  # of a pod that waits for a slot; then it is a task
ROLE_PLACEHOLDER = "placeholder"  # of a pod by which an autoscaler sees what a gated one lacks

GATE = f"{GROUP}/awaiting-capacity"

# Of task pods
ANNOTATION_OPENED = f"{GROUP}/opened-at"  # when the gate was opened, seconds since 1970
ANNOTATION_FAILED_PLACEMENTS = f"{GROUP}/attempt"  # earlier pods of the slot that no node started
ANNOTATION_LOST = f"{GROUP}/lost-at"  # when the pod that this one replaces was lost
ANNOTATION_REPLACES = f"{GROUP}/replaces"  # in a move to an emptier node: the pod that it replaces
ANNOTATION_SLOT = f"{GROUP}/slot"  # of one that was a standby: the slot that it was given, as JSON
# Of task pods and coordinator pods
ANNOTATION_TEMPLATE = f"{GROUP}/template"  # digest of what it was made from; another now: outdated
ANNOTATION_TOKEN = f"{GROUP}/token"  # digest of the topology's token when it was created
ANNOTATION_SHAPE = f"{GROUP}/shape"  # digest of its spec: `rekindle_operator.resources.shape`
ANNOTATION_IMAGE = f"{GROUP}/image"  # image that a coordinator's pod was created with
# Of a topology
ANNOTATION_ROLL = f"{GROUP}/roll"  # replace running pods that are outdated
# Of Leases
ANNOTATION_REPORT = f"{GROUP}/report"  # a coordinator's: number of the report that is still valid
ANNOTATION_HOLDER_PROCESS = f"{GROUP}/holder-process"  # the operator's: process that holds it

TOPOLOGY_KEY = "topology.json"  # of the ConfigMap of an accepted generation
TOKEN_KEY = "token"  # of the Secret of the topology's token
RUNNING_TOKEN_KEY = "running"  # of that Secret: the token of pods made before it was replaced
READER_TOKEN_KEY = "reader"  # of that Secret: for readers of stream sinks
PART_OF_LABEL, PART_OF = "app.kubernetes.io/part-of", "rekindle"  # of all objects of a topology
OWN_VARIABLES = "REKINDLE_"  # names of the operator's variables in pods begin so
TASK_CONTAINER = "task"  # of a task's pod; `podTemplate` is merged into it by this name
VOLUME_MOUNT = "/var/lib/rekindle"  # of the claim `checkpoint.volume`, in tasks and coordinators
SECRETS_MOUNT = "/etc/rekindle-secrets"  # below it a directory for each Secret of a source or sink

COORDINATOR_KEY = "coordinator"  # in `status.slots`, as its slot; and in names of objects
ALL_REMOVED_SEGMENTS = "-"  # in keys of `status.slots`: for all segments that edits have removed
MAX_NAME_CHARS = 63  # a pod's name is its host name


def object_name(*parts: str | int) -> str:
    """Join parts to a DNS label; a long one is truncated and ends in a hash of the full name."""
    name = "-".join(str(part) for part in parts).replace("_", "-").lower()
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_CHARS - 9].rstrip('-')}-{digest}"


def generation_record_name(topology: str, generation: int) -> str:
    """Name of the ConfigMap of an accepted generation."""
    return object_name(topology, f"g{generation}")


def coordinator_name(topology: str) -> str:
    """Name of the coordinator's ServiceAccount, Role, RoleBinding and Lease."""
    return object_name(topology, COORDINATOR_KEY)


def disruption_budget_name(topology: str) -> str:
    """Name of the PodDisruptionBudget of a topology's pods."""
    return object_name(topology, "pods")


def token_secret_name(topology: str, uid: str) -> str:
    """Name of the Secret. It contains the UID: a topology that had the same name before may still
    have its Secret, which is about to be deleted and must not be used."""
    return object_name(topology, "token", uid[:8])


def coordinator_pod_name(topology: str, incarnation: int) -> str:
    return object_name(topology, COORDINATOR_KEY, incarnation)


def standby_pod_name(topology: str, generation: int, number: int) -> str:
    """No task's pod has this name: those end in three numbers."""
    return object_name(topology, ROLE_STANDBY, generation, number)


def task_pod_name(
    topology: str, segment_name: str, partition: int, replica: int, incarnation: int
) -> str:
    """Hyphens of the segment's name are doubled: otherwise segment `b-c` of topology `a` and
    segment `c` of topology `a-b` would have the same pod names. So the topology's name ends at the
    last sequence of hyphens whose length is odd, not counting those before the three numbers."""
    segment = segment_name.replace("_", "-").replace("-", "--")
    return object_name(topology, segment, partition, replica, incarnation)
