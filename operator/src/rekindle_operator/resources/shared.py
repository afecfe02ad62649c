"""What the coordinator's pod takes from `podTemplate`, which is written for tasks. Pure.

It reads the same store from the same network, and is admitted by the same policies: so it takes
where a pod may run, as whom, with which labels, variables, certificates and pull secrets. It does
not take what is a task's alone: its account, resources, further containers, disks, the image's
command, and how tasks spread.

Design: docs/operations.md#the-coordinators-pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.merge import merge

_OF_POD = (
    "tolerations",
    "priorityClassName",
    "nodeSelector",
    "securityContext",
    "imagePullSecrets",
    "runtimeClassName",
    "schedulerName",
    "dnsPolicy",
    "dnsConfig",
    "hostAliases",
)
_OF_CONTAINER = ("env", "envFrom", "securityContext", "imagePullPolicy")
_READ_ONLY_VOLUMES = ("configMap", "secret", "projected")  # certificates, credentials
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def shared_metadata(template: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """(labels, annotations)."""
    meta = template.get("metadata") or {}
    return dict(meta.get("labels") or {}), dict(meta.get("annotations") or {})


def with_shared(spec: Manifest, template: Mapping[str, Any], task: str) -> Manifest:
    """`spec` of one container, with what it shares with the container `task` of the template."""
    given = template.get("spec") or {}
    containers = given.get("containers") or ()
    theirs: Mapping[str, Any] = next((c for c in containers if c.get("name") == task), {})
    volumes = [v for v in given.get("volumes") or () if any(k in v for k in _READ_ONLY_VOLUMES)]
    names = {volume["name"] for volume in volumes}
    mounts = [m for m in theirs.get("volumeMounts") or () if m.get("name") in names]
    pod = {key: given[key] for key in _OF_POD if key in given}
    own = {key: theirs[key] for key in _OF_CONTAINER if key in theirs}
    container = merge(spec["containers"][0], {**own, "volumeMounts": mounts})
    return {**merge(spec, {**pod, "volumes": volumes}), "containers": [container]}


def required_nodes(template: Mapping[str, Any], without: list[Manifest]) -> Manifest | None:
    """Required node affinity: the template's terms, each with the requirements `without`."""
    given = (template.get("spec") or {}).get("affinity") or {}
    required = (given.get("nodeAffinity") or {}).get(_REQUIRED) or {}
    terms = list(required.get("nodeSelectorTerms") or ())
    if not terms and not without:
        return None
    if without:
        fields = [{**t, "matchFields": [*(t.get("matchFields") or ()), *without]} for t in terms]
        terms = fields or [{"matchFields": without}]
    return {_REQUIRED: {"nodeSelectorTerms": terms}}
