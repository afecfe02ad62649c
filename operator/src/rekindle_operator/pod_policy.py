"""What the administrator allows topologies to set for their pods. Pure.

The operator creates the pods, so the author of a topology needs no right to create pods. Therefore
`podTemplate`, and the image, ServiceAccount and Secrets of pods, are restricted here. The default
is the baseline of the Pod Security Standards, and only Secrets whose names end in `-rekindle`. The
spec is checked as it was written, not the merged pods, so each problem has the path of its field.

Design: docs/operations.md#what-topologies-may-ask-of-their-pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from rekindle.errors import Problem

REASON = "NotAllowed"


class Feature(StrEnum):
    """Refused unless it is in `PodPolicy.allow`."""

    HOST_NETWORK = "HostNetwork"
    HOST_PID = "HostPID"
    HOST_IPC = "HostIPC"
    HOST_PORTS = "HostPorts"
    HOST_PATH = "HostPath"
    VOLUMES = "Volumes"
    PRIVILEGED = "Privileged"
    CAPABILITIES = "Capabilities"
    UNCONFINED = "Unconfined"
    SYSCTLS = "Sysctls"
    PRIORITY_CLASSES = "PriorityClasses"


@dataclass(frozen=True, slots=True)
class PodPolicy:
    """ServiceAccounts and Secrets are globs. `images`: allowed prefixes; if empty, all images."""

    allow: frozenset[Feature] = frozenset()
    service_accounts: tuple[str, ...] = ("default",)
    # A suffix: the Secrets of tokens begin with the topology's name, which its author chooses.
    secrets: tuple[str, ...] = ("*-rekindle",)
    images: tuple[str, ...] = ()
    # One plan covers all topologies: thousands of tasks in one delay the recovery of all others.
    max_tasks: int = 1024


def parse_policy(raw: Mapping[str, Any]) -> PodPolicy:
    """From the chart's value `podPolicy`. Raises ValueError for unknown keys and features."""
    known = {"allow", "serviceAccounts", "secrets", "images", "maxTasks"}
    if unknown := set(raw) - known:
        raise ValueError(f"podPolicy: unknown keys {sorted(unknown)}; use {sorted(known)}")
    default = PodPolicy()
    return PodPolicy(
        allow=frozenset(Feature(name) for name in raw.get("allow") or ()),
        service_accounts=tuple(raw.get("serviceAccounts", default.service_accounts)),
        secrets=tuple(raw.get("secrets", default.secrets)),
        images=tuple(raw.get("images", default.images)),
        max_tasks=int(raw.get("maxTasks", default.max_tasks)),
    )


def task_limit_problems(tasks: int, policy: PodPolicy) -> list[Problem]:
    """`tasks`: of the whole topology, replicas and standbys included."""
    if tasks <= policy.max_tasks:
        return []
    what = f"needs {tasks} tasks; the limit for a topology is {policy.max_tasks}"
    hint = (
        "use fewer partitions or replicas; "
        "an administrator can raise podPolicy.maxTasks in the chart"
    )
    return [Problem("spec", REASON, what, hint)]


def policy_problems(spec: Mapping[str, Any], policy: PodPolicy) -> list[Problem]:
    """Everything in a topology's spec that the policy refuses. Values of a wrong type are skipped:
    the API server refuses them in the dry run."""
    return list(_Check(policy).of(spec))


_CONTAINERS = ("containers", "initContainers")
_HOST = {
    "hostNetwork": Feature.HOST_NETWORK,
    "hostPID": Feature.HOST_PID,
    "hostIPC": Feature.HOST_IPC,
}
_VOLUMES = frozenset(
    {"configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"}
)
"""Kinds of volumes without access to the node or to Secrets."""
_APP_ARMOR_PREFIX = "container.apparmor.security.beta.kubernetes.io/"
"""Of annotations, one a container, from which the API server sets `appArmorProfile`."""
_BASELINE_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)


@dataclass(frozen=True, slots=True)
class _Check:
    policy: PodPolicy

    def of(self, spec: Mapping[str, Any]) -> Iterator[Problem]:
        yield from self._image(spec.get("image"), "spec.image")
        yield from self._account(spec.get("serviceAccountName"), "spec.serviceAccountName")
        checkpoint = _mapping(spec.get("checkpoint"))
        yield from self._secret(checkpoint.get("secretRef"), "spec.checkpoint.secretRef")
        for kind in ("sources", "queries"):
            yield from self._secret_refs(spec.get(kind), f"spec.{kind}")
        template = _mapping(spec.get("podTemplate"))
        annotations = _mapping(_mapping(template.get("metadata")).get("annotations"))
        yield from self._annotations(annotations, "spec.podTemplate.metadata.annotations")
        yield from self._pod(_mapping(template.get("spec")), "spec.podTemplate.spec")

    def _annotations(self, annotations: Mapping[str, Any], path: str) -> Iterator[Problem]:
        for key, profile in annotations.items():
            if key.startswith(_APP_ARMOR_PREFIX) and profile == "unconfined":
                yield from self._feature(Feature.UNCONFINED, f"{path}[{key}]")

    def _pod(self, pod: Mapping[str, Any], path: str) -> Iterator[Problem]:
        for field, feature in _HOST.items():
            if pod.get(field):
                yield from self._feature(feature, f"{path}.{field}")
        # An empty value, or null, would replace the operator's PriorityClass, which never preempts.
        if pod.keys() & {"priorityClassName", "priority", "preemptionPolicy"}:
            yield from self._feature(Feature.PRIORITY_CLASSES, f"{path}.priorityClassName")
        for field in ("serviceAccountName", "serviceAccount"):
            yield from self._account(pod.get(field), f"{path}.{field}")
        yield from self._security(_mapping(pod.get("securityContext")), f"{path}.securityContext")
        for index, volume in _entries(pod, "volumes"):
            yield from self._volume(volume, f"{path}.volumes[{index}]")
        for kind in _CONTAINERS:
            for index, container in _entries(pod, kind):
                yield from self._container(container, f"{path}.{kind}[{index}]")

    def _container(self, container: Mapping[str, Any], path: str) -> Iterator[Problem]:
        yield from self._image(container.get("image"), f"{path}.image")
        for index, port in _entries(container, "ports"):
            if port.get("hostPort"):
                yield from self._feature(Feature.HOST_PORTS, f"{path}.ports[{index}].hostPort")
        security = _mapping(container.get("securityContext"))
        yield from self._security(security, f"{path}.securityContext")
        for index, variable in _entries(container, "env"):
            key = _mapping(_mapping(variable.get("valueFrom")).get("secretKeyRef"))
            yield from self._secret(key.get("name"), f"{path}.env[{index}].valueFrom.secretKeyRef")
        for index, source in _entries(container, "envFrom"):
            name = _mapping(source.get("secretRef")).get("name")
            yield from self._secret(name, f"{path}.envFrom[{index}].secretRef")

    def _volume(self, volume: Mapping[str, Any], path: str) -> Iterator[Problem]:
        for kind in volume.keys() - {"name"}:
            source = _mapping(volume[kind])
            match kind:
                case "hostPath":
                    yield from self._feature(Feature.HOST_PATH, f"{path}.hostPath")
                case "secret":
                    yield from self._secret(source.get("secretName"), f"{path}.secret")
                case "projected":
                    for index, part in _entries(source, "sources"):
                        name = _mapping(part.get("secret")).get("name")
                        yield from self._secret(name, f"{path}.projected.sources[{index}].secret")
                case "image":
                    yield from self._image(source.get("reference"), f"{path}.image")
                case _ if kind not in _VOLUMES and volume[kind] is not None:
                    yield from self._feature(Feature.VOLUMES, f"{path}.{kind}")

    def _security(self, context: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """Of a pod or a container."""
        if context.get("privileged"):
            yield from self._feature(Feature.PRIVILEGED, f"{path}.privileged")
        if _mapping(context.get("windowsOptions")).get("hostProcess"):
            yield from self._feature(Feature.PRIVILEGED, f"{path}.windowsOptions.hostProcess")
        added = _mapping(context.get("capabilities")).get("add")
        if isinstance(added, list) and not _BASELINE_CAPABILITIES.issuperset(map(str, added)):
            yield from self._feature(Feature.CAPABILITIES, f"{path}.capabilities.add")
        for profile in ("seccompProfile", "appArmorProfile"):
            if _mapping(context.get(profile)).get("type") == "Unconfined":
                yield from self._feature(Feature.UNCONFINED, f"{path}.{profile}")
        if context.get("procMount") not in (None, "Default"):
            yield from self._feature(Feature.UNCONFINED, f"{path}.procMount")
        if context.get("seLinuxOptions"):
            yield from self._feature(Feature.UNCONFINED, f"{path}.seLinuxOptions")
        if context.get("sysctls"):
            yield from self._feature(Feature.SYSCTLS, f"{path}.sysctls")

    def _feature(self, feature: Feature, path: str) -> Iterator[Problem]:
        if feature not in self.policy.allow:
            hint = f"an administrator can add {feature} to podPolicy.allow in the chart"
            yield Problem(path, REASON, "the pod policy does not allow this", hint)

    def _account(self, name: Any, path: str) -> Iterator[Problem]:
        if name and not _matches(str(name), self.policy.service_accounts):
            what = f"the pod policy does not allow the ServiceAccount {name}"
            yield Problem(path, REASON, what, _hint("serviceAccounts", name))

    def _secret(self, name: Any, path: str) -> Iterator[Problem]:
        if name and not _matches(str(name), self.policy.secrets):
            names = ", ".join(self.policy.secrets) or "none"
            what = f"the pod policy does not allow the Secret {name} (allowed: {names})"
            yield Problem(path, REASON, what, _hint("secrets", name))

    def _secret_refs(self, part: Any, path: str) -> Iterator[Problem]:
        """Of sources and sinks, in whatever field of theirs."""
        if isinstance(part, list):
            for index, item in enumerate(part):
                yield from self._secret_refs(item, f"{path}[{index}]")
        elif isinstance(part, Mapping):
            for field, value in part.items():
                if field == "secretRef":
                    yield from self._secret(value, f"{path}.secretRef")
                elif field != "generator":  # which may have a column of that name
                    yield from self._secret_refs(value, f"{path}.{field}")

    def _image(self, name: Any, path: str) -> Iterator[Problem]:
        prefixes = self.policy.images
        if name and prefixes and not any(_has_prefix(str(name), prefix) for prefix in prefixes):
            what = (
                f"the pod policy does not allow the image {name} (allowed: {', '.join(prefixes)})"
            )
            yield Problem(path, REASON, what, _hint("images", "its registry"))


def _hint(value: str, name: Any) -> str:
    return f"an administrator can add {name} to podPolicy.{value} in the chart"


def _has_prefix(image: str, prefix: str) -> bool:
    """Whether it begins with the prefix, up to a separator: `registry.example` is no prefix of
    `registry.example.org/image`."""
    rest = image.removeprefix(prefix)
    return image.startswith(prefix) and (
        not rest or prefix.endswith(("/", ":", "@")) or rest[0] in "/:@"
    )


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _entries(holder: Mapping[str, Any], field: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    values = holder.get(field)
    for index, value in enumerate(values if isinstance(values, list) else ()):
        if isinstance(value, Mapping):
            yield index, value
