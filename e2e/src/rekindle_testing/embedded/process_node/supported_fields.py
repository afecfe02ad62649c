"""Which fields of a pod's spec a process node supports, as one table.  Pure.

A field that is not in the table is refused: what a newer API server adds is not
silently ignored.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rekindle_testing.embedded.process_node.fields import Json

# The reason of the Event about what is ignored.
FIELDS_IGNORED = "FieldsIgnored"


class _Anything:
    def __contains__(self, value: object) -> bool:
        return True


_ANY = _Anything()
# A field with one of these values is as good as absent, so a rule supports them by default.
_EMPTY: tuple[object, ...] = (False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Rule:
    """`supported` values have the effect that Kubernetes documents; `ignorable` ones are
    ignored, with a warning; all others are refused. If both are empty, any value is refused, also
    an empty one."""

    supported: Container[object] = _EMPTY
    ignorable: Container[object] = ()
    hint: str = "a process node does not support it"


# Rules by field; "*" is for all other fields.  Of a list, the rules are for each item.
Table: TypeAlias = Mapping[str, "Rule | Table"]

_YES = Rule(_ANY)
_NO = Rule()


def _all(*fields: str) -> dict[str, Rule]:
    return dict.fromkeys(fields, _YES)


def _only(*values: str) -> Rule:
    return Rule(values, hint=f"only {', '.join(values)}")


_ROOT = Rule((0,), hint="containers run as root")
# Fields of both levels of securityContext.  Those that only harden a pod are ignorable.
_SECURITY: Table = {
    "runAsUser": _ROOT,
    "runAsGroup": _ROOT,
    "runAsNonRoot": Rule(ignorable=(True,), hint="containers run as root"),
    "seccompProfile": Rule(
        ({"type": "Unconfined"},), ({"type": "RuntimeDefault"},), "system calls are not filtered"
    ),
    "appArmorProfile": Rule(({"type": "Unconfined"},)),
}

_PROBE: Table = {
    **dict.fromkeys(("grpc", "tcpSocket"), Rule(hint="use httpGet or exec")),
    "*": _YES,
}
_CONTAINER: Table = {
    **_all("name", "image", "command", "args", "workingDir", "envFrom", "env"),
    **_all("terminationMessagePath"),
    # Images are not pulled, and `changes` reports a resize.
    **_all("imagePullPolicy", "resizePolicy"),
    "terminationMessagePolicy": _only("File"),
    "restartPolicy": Rule(hint="no sidecars; containers restart by the pod's policy"),
    "lifecycle": {"stopSignal": _only("SIGTERM"), "*": Rule(hint="no hooks")},
    "startupProbe": _PROBE,
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "ports": {"hostPort": Rule(hint="a pod binds only to its own address"), "*": _YES},
    "volumeDevices": Rule(hint="no block devices"),
    "volumeMounts": {
        "mountPropagation": _only("None"),
        "recursiveReadOnly": _only("Disabled", "IfPossible"),
        "*": _YES,
    },
    "resources": {
        "limits": {
            "cpu": Rule(("0",), _ANY, "all pods share the machine's processors"),
            "ephemeral-storage": Rule(("0",), hint="use an emptyDir with sizeLimit"),
            "*": _YES,
        },
        "requests": _YES,
    },
    "securityContext": {
        **_SECURITY,
        "allowPrivilegeEscalation": Rule((True,), (False,), "privileges are not limited"),
        "capabilities": {"drop": Rule(ignorable=_ANY, hint="no capability is dropped")},
        "readOnlyRootFilesystem": Rule(ignorable=(True,), hint="the root can be written to"),
        "procMount": _only("Default"),
    },
}
_VOLUMES = ("configMap", "downwardAPI", "secret", "emptyDir", "hostPath", "persistentVolumeClaim")
_VOLUME: Table = {
    **_all("name", *_VOLUMES),
    "emptyDir": {"medium": _only("", "Memory"), "*": _YES},
    "hostPath": {
        "path": _YES,
        "type": _only("", "Directory", "DirectoryOrCreate", "File", "FileOrCreate"),
    },
    "persistentVolumeClaim": {"claimName": _YES, "readOnly": Rule(hint="use the volumeMount's")},
    "projected": {
        "defaultMode": _YES,
        "sources": {
            **_all("configMap", "downwardAPI", "secret", "serviceAccountToken"),
            "*": Rule((), hint="not supported"),
        },
    },
    "*": Rule((), hint=f"not one of {', '.join((*_VOLUMES, 'projected'))}"),
}
_POD: Table = {
    **_all("activeDeadlineSeconds", "automountServiceAccountToken", "hostAliases", "hostname"),
    **_all("nodeName", "overhead", "readinessGates", "restartPolicy", "serviceAccount"),
    **_all("serviceAccountName", "terminationGracePeriodSeconds"),
    # For the scheduler and the controllers to act on.
    **_all("affinity", "nodeSelector", "preemptionPolicy", "priority", "priorityClassName"),
    **_all("schedulerName", "schedulingGates", "tolerations", "topologySpreadConstraints"),
    # Images are not pulled, and Services are not implemented.
    **_all("imagePullSecrets", "enableServiceLinks"),
    "subdomain": Rule(ignorable=_ANY, hint="there is no DNS"),
    # The machine's resolver is used, as Default says; the others are what all pods have.
    "dnsPolicy": _only("ClusterFirst", "ClusterFirstWithHostNet", "Default"),
    "os": {"name": _only("linux")},
    "hostUsers": Rule((True,), hint="no user namespaces"),
    "containers": _CONTAINER,
    "initContainers": _CONTAINER,
    "ephemeralContainers": Rule(ignorable=_ANY, hint="not started"),
    "volumes": _VOLUME,
    "securityContext": {**_SECURITY, "supplementalGroupsPolicy": _only("Merge")},
}


def refused(pod: Json) -> list[str]:
    """Fields that a process node does not support, by field path."""
    return [text for text, ignorable in _check("spec", pod["spec"], _POD) if not ignorable]


def ignored(pod: Json) -> list[str]:
    """Fields that have no effect on a process node, and that the pod does not need."""
    return [text for text, ignorable in _check("spec", pod["spec"], _POD) if ignorable]


def changes(before: Json, after: Json) -> Iterator[str]:
    """Changes of an admitted pod, as by resizing or debugging it: this node keeps the
    containers that it has admitted."""
    for group in ("initContainers", "containers", "ephemeralContainers"):
        known = {c["name"]: c for c in before["spec"].get(group) or []}
        for container in after["spec"].get(group) or []:
            old: Json = known.get(container["name"], {})
            for field in ("image", "resources"):
                if container.get(field) != old.get(field):
                    yield f"spec.{group}[{container['name']}].{field}: changes have no effect"


def _check(path: str, value: Any, rule: Rule | Table) -> Iterator[tuple[str, bool]]:
    if isinstance(rule, Rule):
        if value not in rule.supported:
            yield f"{path}: {rule.hint}", value in rule.ignorable
    elif isinstance(value, list):
        for item in value:
            name = f"[{item['name']}]" if "name" in item else ""
            yield from _check(path + name, item, rule)
    else:
        for field, inner in value.items():
            yield from _check(f"{path}.{field}", inner, rule.get(field, rule.get("*", _NO)))
