"""Parts of `podTemplate` that also apply to the coordinator's pod. Pure.

The template is written for tasks. The coordinator reads the same store from the same network, and
the same policies admit it. So it takes from the template where a pod may run, its security context,
labels, variables, certificates and pull secrets. It does not take the ServiceAccount, resources,
further containers, disks, commands and topology spread of tasks.

Design: docs/operations.md#the-coordinators-pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.merge import merge

_POD_FIELDS = (
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
_CONTAINER_FIELDS = ("env", "envFrom", "securityContext", "imagePullPolicy")
_READ_ONLY_VOLUMES = ("configMap", "secret", "projected")  # certificates, credentials
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def template_metadata(template: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """(labels, annotations)."""
    meta = template.get("metadata") or {}
    return dict(meta.get("labels") or {}), dict(meta.get("annotations") or {})


def with_template_parts(
    spec: Manifest, template: Mapping[str, Any], container_name: str
) -> Manifest:
    """`spec`, which has one container, with the shared parts of the template, and of the template's
    container `container_name`."""
    template_spec = template.get("spec") or {}
    containers = template_spec.get("containers") or ()
    named = (c for c in containers if c.get("name") == container_name)
    container_template: Mapping[str, Any] = next(named, {})
    volumes = [
        v for v in template_spec.get("volumes") or () if any(k in v for k in _READ_ONLY_VOLUMES)
    ]
    names = {volume["name"] for volume in volumes}
    mounts = [m for m in container_template.get("volumeMounts") or () if m.get("name") in names]
    pod = {key: template_spec[key] for key in _POD_FIELDS if key in template_spec}
    own = {key: container_template[key] for key in _CONTAINER_FIELDS if key in container_template}
    container = merge(spec["containers"][0], {**own, "volumeMounts": mounts})
    return {**merge(spec, {**pod, "volumes": volumes}), "containers": [container]}


def required_nodes(template: Mapping[str, Any], exclusions: list[Manifest]) -> Manifest | None:
    """Required node affinity: the template's terms, each extended by the `exclusions`
    (requirements on a node's name)."""
    affinity = (template.get("spec") or {}).get("affinity") or {}
    required = (affinity.get("nodeAffinity") or {}).get(_REQUIRED) or {}
    terms = list(required.get("nodeSelectorTerms") or ())
    if not terms and not exclusions:
        return None
    if exclusions:
        fields = [{**t, "matchFields": [*(t.get("matchFields") or ()), *exclusions]} for t in terms]
        terms = fields or [{"matchFields": exclusions}]
    return {_REQUIRED: {"nodeSelectorTerms": terms}}
