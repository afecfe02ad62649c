"""The status of a pod, computed from the state of its containers.  Pure.

Follows the kubelet: same phases, same conditions, same reasons.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle_testing.embedded.process_node.fields import Json
from rekindle_testing.embedded.process_node.restarts import Exit


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container as the status shows it. At most one of the three states is set; with none, its
    volumes are not prepared yet."""

    name: str
    image: str
    running_since: float | None = None
    ended: Exit | None = None
    waiting: tuple[str, str] | None = None  # reason, message
    last_exit: Exit | None = None  # before this state
    restarts: int = 0
    started: bool = False
    ready: bool = False
    container_id: str = ""


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """All that the status of a pod depends on, besides its spec."""

    init: Sequence[ContainerView]
    main: Sequence[ContainerView]
    pod_ip: str
    host_ip: str
    start_time: float
    # Reason and message, for a pod that was refused or evicted: phase Failed, whatever its
    # containers do.
    failure: tuple[str, str] | None = None
    volumes_ready: bool = True
    conditions: Sequence[Json] = field(default_factory=tuple)


def rfc3339(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def build(pod: Json, view: ObservedPod, now: float) -> Json:
    status: Json = {
        "phase": phase(pod["spec"].get("restartPolicy", "Always"), view),
        "conditions": conditions(pod, view, now),
        "observedGeneration": pod["metadata"].get("generation", 0),
        "startTime": rfc3339(view.start_time),
        "hostIP": view.host_ip,
        "hostIPs": [{"ip": view.host_ip}],
    }
    if view.pod_ip:
        status |= {"podIP": view.pod_ip, "podIPs": [{"ip": view.pod_ip}]}
    if view.failure is not None:
        status |= {"reason": view.failure[0], "message": view.failure[1]}
    if view.init:
        status["initContainerStatuses"] = [container_status(c) for c in view.init]
    if view.main:
        status["containerStatuses"] = [container_status(c) for c in view.main]
    return status


def is_contradicted(published: Json, seen: Json) -> bool:
    """Whether another client changed a condition that the node had set."""
    own = {c["type"]: c["status"] for c in published["conditions"]}
    others = {c["type"]: c["status"] for c in seen.get("conditions") or []}
    return any(others.get(condition_type, value) != value for condition_type, value in own.items())


def phase(restart_policy: str, view: ObservedPod) -> str:
    if view.failure is not None:
        return "Failed"
    for container in view.init:
        if container.ended is not None and container.ended.exit_code != 0:
            return "Failed" if restart_policy == "Never" else "Pending"
        if container.ended is None:
            return "Pending"
    if any(_never_ran(c) for c in view.main) or not view.main:
        return "Pending"
    if any(c.running_since is not None for c in view.main):
        return "Running"
    # Containers that wait have ended before and are in their back-off.
    ended = [c.ended for c in view.main if c.ended is not None]
    if restart_policy == "Always" or len(ended) < len(view.main):
        return "Running"
    if all(e.exit_code == 0 for e in ended):
        return "Succeeded"
    return "Failed" if restart_policy == "Never" else "Running"


def conditions(pod: Json, view: ObservedPod, now: float) -> list[Json]:
    ended = phase(pod["spec"].get("restartPolicy", "Always"), view) in ("Succeeded", "Failed")
    completed = "PodCompleted" if not _failed(pod, view) else "PodFailed"
    uninitialized = [
        c.name for c in view.init if not (c.ended is not None and c.ended.exit_code == 0)
    ]
    unready = [c.name for c in view.main if not c.ready]
    computed: list[tuple[str, bool, str, str]] = [
        ("PodReadyToStartContainers", view.volumes_ready and not ended, "", ""),
        _condition("Initialized", uninitialized, "ContainersNotInitialized", "incomplete"),
    ]
    if ended:
        computed += [
            (condition_type, False, completed, "")
            for condition_type in ("ContainersReady", "Ready")
        ]
    else:
        containers = _condition("ContainersReady", unready, "ContainersNotReady", "unready")
        gates = [g["conditionType"] for g in pod["spec"].get("readinessGates") or []]
        unmet_gates = [g for g in gates if _status_of(pod, g) != "True"]
        ready = _condition("Ready", unready, "ContainersNotReady", "unready")
        if not unready and unmet_gates:
            message = f"readiness gates not True: {unmet_gates}"
            ready = ("Ready", False, "ReadinessGatesNotReady", message)
        computed += [containers, ready]
    computed.append(("PodScheduled", True, "", ""))
    return [_with_times(condition, view.conditions, now) for condition in computed]


def container_status(container: ContainerView) -> Json:
    state: Json
    if container.running_since is not None:
        state = {"running": {"startedAt": rfc3339(container.running_since)}}
    elif container.ended is not None:
        state = {"terminated": _terminated(container.ended, container.container_id)}
    else:
        reason, message = container.waiting or ("ContainerCreating", "")
        state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}
    last = container.last_exit
    return {
        "name": container.name,
        "image": container.image,
        "imageID": f"process-node://{container.image}",
        "containerID": container.container_id,
        "state": state,
        "lastState": {} if last is None else {"terminated": _terminated(last, "")},
        "restartCount": container.restarts,
        "started": container.started,
        "ready": container.ready,
    }


def _never_ran(container: ContainerView) -> bool:
    """Waiting for its first start, or without any state: its volumes are not prepared."""
    return (
        container.running_since is None and container.ended is None and container.last_exit is None
    )


def _failed(pod: Json, view: ObservedPod) -> bool:
    return phase(pod["spec"].get("restartPolicy", "Always"), view) == "Failed"


def _terminated(ended: Exit, container_id: str) -> Json:
    status: Json = {
        "exitCode": ended.exit_code,
        "reason": ended.reason,
        "startedAt": rfc3339(ended.started_at),
        "finishedAt": rfc3339(ended.finished_at),
    }
    if ended.signal:
        status["signal"] = ended.signal
    if ended.message:
        status["message"] = ended.message
    if container_id:
        status["containerID"] = container_id
    return status


def _condition(
    condition_type: str, lacking: Sequence[str], reason: str, word: str
) -> tuple[str, bool, str, str]:
    if not lacking:
        return condition_type, True, "", ""
    return condition_type, False, reason, f"containers with {word} status: [{' '.join(lacking)}]"


def _status_of(pod: Json, condition_type: str) -> str:
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == condition_type:
            return str(condition["status"])
    return "Unknown"


def _with_times(condition: tuple[str, bool, str, str], before: Sequence[Json], now: float) -> Json:
    condition_type, value, reason, message = condition
    status = "True" if value else "False"
    changed = rfc3339(now)
    for old in before:
        if old["type"] == condition_type and old["status"] == status:
            changed = old.get("lastTransitionTime") or changed
    # null, in a patch, removes a reason that an earlier status had.
    return {
        "type": condition_type,
        "status": status,
        "lastTransitionTime": changed,
        "reason": reason or None,
        "message": message or None,
    }
