"""Whether a pod may run here: what the node can do, and what is left on it.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from embedded.process_node import quantities
from embedded.process_node.fields import Json

UNSUPPORTED = "UnsupportedByProcessNode"

VOLUME_KINDS = (
    "configMap",
    "downwardAPI",
    "emptyDir",
    "hostPath",
    "persistentVolumeClaim",
    "projected",
    "secret",
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason and message of a pod that fails before it starts."""

    reason: str
    message: str


def requests(pod: Json) -> dict[str, Decimal]:
    """What a pod takes of the node: its containers together, or its largest init
    container, whichever is more, and the overhead."""
    spec = pod["spec"]
    total = _sum(_requests_of(c) for c in spec["containers"])
    for container in spec.get("initContainers") or []:
        for resource, amount in _requests_of(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    overhead = {r: quantities.parse(q) for r, q in (spec.get("overhead") or {}).items()}
    return _sum([total, overhead])


def admit(pod: Json, others: Iterable[Json], allocatable: Mapping[str, str]) -> Refusal | None:
    """`others` are the admitted pods of the node that have not ended."""
    if problems := list(unsupported(pod)):
        return Refusal(UNSUPPORTED, "; ".join(problems))
    others = list(others)
    if len(others) + 1 > quantities.whole(allocatable["pods"]):
        return Refusal("OutOfpods", f"Node has room for {allocatable['pods']} pods, all taken")
    used = _sum(requests(other) for other in others)
    for resource, amount in sorted(requests(pod).items()):
        free = quantities.parse(allocatable.get(resource, "0")) - used.get(resource, Decimal(0))
        if amount > 0 and amount > free:
            return Refusal(
                f"OutOf{resource}",
                f"Node didn't have enough resource: {resource}, requested: {amount:f}, "
                f"free: {free:f}, capacity: {allocatable.get(resource, '0')}",
            )
    return None


def unsupported(pod: Json) -> Iterator[str]:
    """What a process node will not pretend to do, by field path."""
    spec = pod["spec"]
    for field in ("hostNetwork", "hostPID", "hostIPC", "runtimeClassName", "resourceClaims"):
        if spec.get(field):
            yield f"spec.{field}: a process node does not offer it"
    if (spec.get("os") or {}).get("name", "linux") != "linux":
        yield "spec.os.name: only linux"
    for volume in spec.get("volumes") or []:
        yield from _unsupported_volume(volume)
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy"):
            yield f"spec.initContainers[{container['name']}].restartPolicy: no sidecars"
        yield from _unsupported_in(container, "initContainers")
    for container in spec["containers"]:
        yield from _unsupported_in(container, "containers")


def _unsupported_volume(volume: Json) -> Iterator[str]:
    path = f"spec.volumes[{volume['name']}]"
    kinds = [kind for kind in volume if kind != "name"]
    for kind in kinds:
        if kind not in VOLUME_KINDS:
            yield f"{path}.{kind}: not one of {', '.join(VOLUME_KINDS)}"
    for source in (volume.get("projected") or {}).get("sources") or []:
        for kind in source:
            if kind not in ("configMap", "downwardAPI", "secret", "serviceAccountToken"):
                yield f"{path}.projected.{kind}: not supported"


def _unsupported_in(container: Json, group: str) -> Iterator[str]:
    path = f"spec.{group}[{container['name']}]"
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if "grpc" in (container.get(name) or {}):
            yield f"{path}.{name}.grpc: use httpGet, tcpSocket or exec"
    if container.get("volumeDevices"):
        yield f"{path}.volumeDevices: no block devices"
    for port in container.get("ports") or []:
        if port.get("hostPort"):
            yield f"{path}.ports.hostPort: a pod binds only to its own address"
    for mount in container.get("volumeMounts") or []:
        if mount.get("mountPropagation", "None") != "None":
            yield f"{path}.volumeMounts.mountPropagation: only None"


def _requests_of(container: Json) -> dict[str, Decimal]:
    resources: Json = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: quantities.parse(quantity) for resource, quantity in wanted.items()}


def _sum(parts: Iterable[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    return total
