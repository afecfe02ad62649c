"""Parses JSON objects of the API into the views of a snapshot. Only what decisions need. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rekindle import names
from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.containers import (
    container_error,
    is_creating_containers,
    own_container,
    sidecar_failure,
)
from rekindle_operator.cluster.model import (
    GenerationRecordView,
    LeaseView,
    NodeView,
    OwnedView,
    PodEndpoint,
    PodView,
    Taint,
    Toleration,
    TopologyView,
)
from rekindle_operator.tokens import decoded, digests_of

Json = Mapping[str, Any]

_INTEGER = re.compile(r"[0-9]{1,18}")

_FIRST_REPORT_S = 5.0  # until a kubelet first reports a pod; no task is ready and fails so soon


def version_of(raw: Json) -> int:
    """resourceVersions of one store are comparable integers."""
    return int((raw.get("metadata") or {}).get("resourceVersion") or 0)


def parse_time(text: str | None) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def pod_requests(spec: Json) -> ResourceAmounts:
    """As the scheduler counts. Init containers run one after another, beside the sidecars (init
    containers with `restartPolicy: Always`) that were started before them (KEP-753)."""
    requests = total(_container_requests(c) for c in spec.get("containers") or ())
    sidecars, starting = ResourceAmounts(), ResourceAmounts()
    for container in spec.get("initContainers") or ():
        need = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            requests, sidecars = requests + need, sidecars + need
            starting = starting.highest(sidecars)
        else:
            starting = starting.highest(need + sidecars)
    requests = _with_pod_level(requests.highest(starting), spec.get("resources") or {})
    return requests + ResourceAmounts.parse(spec.get("overhead"), pods=1)


def _with_pod_level(requests: ResourceAmounts, resources: Json) -> ResourceAmounts:
    """Pod-level requests. Where no container requests anything, the pod-level limit counts."""
    if not resources:
        return requests
    limits = resources.get("limits") or {}
    unset = {"cpu": requests.cpu_m == 0, "memory": requests.memory == 0}
    filled = {name: limits[name] for name, is_unset in unset.items() if is_unset and name in limits}
    return requests.with_pod_level({**filled, **(resources.get("requests") or {})})


def _container_requests(container: Json) -> ResourceAmounts:
    resources = container.get("resources") or {}
    # A container without a request gets its limit as the request.
    return ResourceAmounts.parse(
        {**(resources.get("limits") or {}), **(resources.get("requests") or {})}, pods=0
    )


def tolerations_of(spec: Json) -> tuple[Toleration, ...]:
    return tuple(
        Toleration(
            t.get("key", ""), t.get("operator", "Equal"), t.get("value", ""), t.get("effect", "")
        )
        for t in spec.get("tolerations") or ()
    )


def pod_view(raw: Json) -> PodView:
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    bound = spec.get("nodeName")
    own = labels.get(names.LABEL_ROLE, "")  # the name of the container, too
    own = names.TASK_CONTAINER if own == names.ROLE_STANDBY else own
    ready = _is_ready(status, own)
    sidecar_error, sidecar_ended = sidecar_failure(status, own)
    return PodView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        version=version_of(raw),
        created_at=parse_time(meta.get("creationTimestamp")),
        phase=status.get("phase", "Pending"),
        node=bound,
        requests=pod_requests(spec),
        terminating=bool(meta.get("deletionTimestamp")),
        accepted_by_kubelet=bool(status.get("startTime"))
        or status.get("phase", "Pending") != "Pending",
        ready=ready,
        was_ready=ready or _was_ready(status),
        started=bool(own_container(status, own).get("started")),
        restarted_at=_restarted_at(own_container(status, own)),
        owner_uid=_controller(meta),
        topology=labels.get(names.LABEL_TOPOLOGY),
        role=labels.get(names.LABEL_ROLE),
        ip=str(status.get("podIP") or ""),
        helm_release=labels.get(names.LABEL_OPERATOR_DEPLOYMENT, ""),
        image=annotations.get(names.ANNOTATION_IMAGE) or _image(spec),
        slot=_slot(labels),
        segment_name=labels.get(names.LABEL_SEGMENT_NAME, ""),
        incarnation=_integer(labels.get(names.LABEL_INCARNATION)),
        generation=_integer(labels.get(names.LABEL_GENERATION)),
        template_digest=annotations.get(names.ANNOTATION_TEMPLATE, ""),
        token_digest=annotations.get(names.ANNOTATION_TOKEN, ""),
        shape=annotations.get(names.ANNOTATION_SHAPE, ""),
        container_error=container_error(status, own),
        sidecar_error=sidecar_error,
        sidecar_failed_at=parse_time(sidecar_ended) if sidecar_ended else math.inf,
        creating_containers=is_creating_containers(spec, status, own),
        gates=tuple(g["name"] for g in spec.get("schedulingGates") or ()),
        required_node=None if bound else required_node(spec.get("affinity")),
        failed_placements=_integer(annotations.get(names.ANNOTATION_FAILED_PLACEMENTS)),
        placement_failure=_failure_message(status) if bound else _scheduler_message(status),
        predecessor_lost_at=_number(annotations.get(names.ANNOTATION_LOST)),
        replaces=annotations.get(names.ANNOTATION_REPLACES, ""),
        given_slot=annotations.get(names.ANNOTATION_SLOT, ""),
        annotations={} if bound else annotations,
        node_selector={} if bound else spec.get("nodeSelector") or {},
        tolerations=() if bound else tolerations_of(spec),
        affinity=None if bound else spec.get("affinity"),
    )


def required_node(affinity: Json | None) -> str | None:
    """The node that an opened gate requires (`resources.task.required_node_affinity`)."""
    node_affinity = (affinity or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field.get("key") == "metadata.name" and field.get("operator") == "In":
                return str(field["values"][0])
    return None


def node_view(raw: Json) -> NodeView:
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    conditions: Iterable[Json] = status.get("conditions") or ()
    ready: Json = next((c for c in conditions if c["type"] == "Ready"), {})
    return NodeView(
        name=meta["name"],
        uid=meta["uid"],
        version=version_of(raw),
        ready=ready.get("status") == "True",
        readiness_changed_at=parse_time(ready.get("lastTransitionTime")),
        cordoned=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(t["key"], t.get("value", ""), t["effect"]) for t in spec.get("taints") or ()
        ),
        labels=meta.get("labels") or {},
        allocatable=ResourceAmounts.parse(status.get("allocatable")),
        kubelet=_kubelet(status),
        created_at=parse_time(meta.get("creationTimestamp")),
    )


def _kubelet(status: Json) -> PodEndpoint | None:
    addresses: Iterable[Json] = status.get("addresses") or ()
    host = next((str(a["address"]) for a in addresses if a["type"] == "InternalIP"), None)
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    return PodEndpoint(host, int(port)) if host and port else None


def lease_view(raw: Json, seen_at: float) -> LeaseView:
    """`seen_at`: when this process saw the Lease's last renewal."""
    meta = raw["metadata"]
    holder = (raw.get("spec") or {}).get("holderIdentity") or ""
    number = (meta.get("annotations") or {}).get(names.ANNOTATION_REPORT)
    return LeaseView(
        namespace=meta["namespace"],
        name=meta["name"],
        version=version_of(raw),
        holder=str(holder),
        seen_at=seen_at,
        report_number=None if number is None else _integer(number, -1),
        owner_uids=frozenset(str(o["uid"]) for o in meta.get("ownerReferences") or ()),
    )


def generation_record_view(raw: Json) -> GenerationRecordView:
    meta = raw["metadata"]
    labels = meta.get("labels") or {}
    return GenerationRecordView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        version=version_of(raw),
        owner_uid=_controller(meta),
        topology=labels.get(names.LABEL_TOPOLOGY, ""),
        generation=_integer(labels.get(names.LABEL_GENERATION)),
        text=(raw.get("data") or {}).get(names.TOPOLOGY_KEY, ""),
    )


def owned_view(raw: Json, kind: str) -> OwnedView:
    """`kind`: an item of a list does not have it."""
    meta, labels = raw["metadata"], {"labels": raw["metadata"].get("labels") or {}}
    return OwnedView(
        kind=kind,
        namespace=meta["namespace"],
        name=meta["name"],
        version=version_of(raw),
        owner_uid=_controller(meta),
        content={**raw, "metadata": labels},
    )


def secret_view(raw: Json) -> OwnedView:
    """Without the Secret's values."""
    values = decoded(raw.get("data"))
    without = {k: v for k, v in raw.items() if k not in ("data", "stringData")}
    token = digests_of(values, immutable=bool(raw.get("immutable")))
    is_refused = names.TOKEN_KEY in (raw.get("data") or {}) and names.TOKEN_KEY not in values
    token = replace(token, is_refused=is_refused)
    return replace(owned_view(without, "Secret"), token=token)


def topology_view(raw: Json) -> TopologyView:
    meta = raw["metadata"]
    return TopologyView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        version=version_of(raw),
        generation=int(meta.get("generation") or 1),
        creation_timestamp=meta["creationTimestamp"],
        deleting=bool(meta.get("deletionTimestamp")),
        spec=raw.get("spec") or {},
        status=raw.get("status") or {},
        roll=_is_on((meta.get("annotations") or {}).get(names.ANNOTATION_ROLL)),
        finalizers=tuple(str(name) for name in meta.get("finalizers") or ()),
    )


def _image(spec: Json) -> str:
    containers: Iterable[Json] = spec.get("containers") or ()
    return next((str(c.get("image", "")) for c in containers), "")


def _is_on(annotation: str | None) -> bool:
    return annotation is not None and annotation.lower() not in ("", "false")


def as_of_generation(view: TopologyView, record: GenerationRecordView) -> TopologyView:
    """The topology as it was in the accepted generation that `record` describes."""
    document = json.loads(record.text)
    spec = document["spec"]
    if image := document.get("image"):
        spec = {**spec, "image": image}
    return view.with_spec(record.generation, spec)


def _slot(labels: Json) -> Slot | None:
    try:
        return Slot(
            labels[names.LABEL_SEGMENT],
            int(labels[names.LABEL_PARTITION]),
            int(labels[names.LABEL_REPLICA]),
        )
    except (KeyError, ValueError):
        return None


def _controller(meta: Json) -> str | None:
    """Uid of the owner that is marked as the controller."""
    owners: Iterable[Json] = meta.get("ownerReferences") or ()
    return next((str(o["uid"]) for o in owners if o.get("controller")), None)


def _condition(status: Json, condition_type: str) -> str | None:
    conditions: Iterable[Json] = status.get("conditions") or ()
    return next((str(c["status"]) for c in conditions if c["type"] == condition_type), None)


def _is_ready(status: Json, own: str) -> bool:
    """Of the container that counts: the pod as a whole is not Ready while another one fails, nor on
    a node that is NotReady."""
    container = own_container(status, own)
    whole = _condition(status, "Ready") == "True"
    return bool(container.get("ready", whole))


def _was_ready(status: Json) -> bool:
    """A kubelet reports Ready=False when it starts a pod, so a later change is from True."""
    conditions: Iterable[Json] = status.get("conditions") or ()
    ready: Json = next((c for c in conditions if c["type"] == "Ready"), {})
    began, changed = status.get("startTime"), ready.get("lastTransitionTime")
    if ready.get("status") == "True" or not began or not changed:
        return ready.get("status") == "True"
    return parse_time(changed) - parse_time(began) > _FIRST_REPORT_S


def _restarted_at(container: Json) -> float | None:
    """When it ended last; None: it has never ended."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    return parse_time(ended["finishedAt"]) if ended.get("finishedAt") else None


def _scheduler_message(status: Json) -> str:
    conditions: Iterable[Json] = status.get("conditions") or ()
    unschedulable = (c for c in conditions if c.get("reason") == "Unschedulable")
    return next((str(c.get("message", "")) for c in unschedulable), "")


def _failure_message(status: Json) -> str:
    """Of the kubelet, for a pod that has failed."""
    if status.get("phase") != "Failed":
        return ""
    return ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))


def _integer(text: str | None, default: int = 0) -> int:
    """`default`: for what is not a number. Any user may write annotations, so `str.isdigit` is
    not enough: it accepts `²` and 5,000 digits, and `int` accepts neither."""
    return int(text) if text is not None and _INTEGER.fullmatch(text) else default


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None
