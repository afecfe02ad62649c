"""Why a pod's containers do not run, as its kubelet reports. Pure.

What a pod is for is in one container, that of the task or the coordinator: `own`. The others are
the user's: a failure of theirs is reported, and is no reason to replace the pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.names import ROLE_STANDBY
from rekindle_operator.cluster.model import PodView

_STARTING = ("", "PodInitializing", "ContainerCreating")
_MAX_MESSAGE_CHARS = 300


def container_error(status: Mapping[str, Any], own: str) -> str:
    """Error of the pod's `own` container that waits with one, or that failed and has not restarted
    yet; where that has none and does not run, of an init container, which it waits for. Empty while
    it runs, or starts for the first time. Other containers do not matter to it."""
    if status.get("phase") in ("Succeeded", "Failed") or _runs(own_container(status, own)):
        return ""
    initial: Iterable[Mapping[str, Any]] = status.get("initContainerStatuses") or ()
    for container in (own_container(status, own), *initial):
        if reason := _error_of(container):
            return f"container {container.get('name', '?')}: {reason}"[:_MAX_MESSAGE_CHARS]
    return ""


def own_container(status: Mapping[str, Any], own: str) -> Mapping[str, Any]:
    """Its status; empty: the kubelet has not reported it."""
    containers: Iterable[Mapping[str, Any]] = status.get("containerStatuses") or ()
    return next((c for c in containers if c.get("name") == own), {})


def sidecar_failure(status: Mapping[str, Any], own: str) -> tuple[str, str]:
    """Error of the first container that fails beside the pod's `own` one, while that runs, and when
    it last ended (RFC 3339); empty: it has not, but waits with an error. A container that runs
    between two crashes still counts."""
    if not _runs(own_container(status, own)):
        return "", ""
    for kind in ("initContainerStatuses", "containerStatuses"):
        containers: Iterable[Mapping[str, Any]] = status.get(kind) or ()
        for container in containers:
            if container.get("name") == own:
                continue
            last = container.get("lastState") or {}
            ended = (container.get("state") or {}).get("terminated") or last.get("terminated") or {}
            if ended.get("exitCode"):
                reason = _failure(ended, container)
            elif not (reason := _error_of(container)):
                continue
            text = f"container {container.get('name', '?')}: {reason}"
            return text[:_MAX_MESSAGE_CHARS], str(ended.get("finishedAt") or "")
    return "", ""


def _runs(container: Mapping[str, Any]) -> bool:
    return "running" in (container.get("state") or {})


def _error_of(container: Mapping[str, Any]) -> str:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    if container.get("ready") or _runs(container):
        return ""
    waiting, ended = state.get("waiting"), state.get("terminated") or last.get("terminated")
    failed = _failure(ended, container) if ended and ended.get("exitCode") != 0 else ""
    if waiting and waiting.get("reason", "") not in _STARTING:
        why = ": ".join(str(waiting[k]) for k in ("reason", "message") if waiting.get(k))
        return f"{why} (last: {failed})" if failed else why
    return failed


def _failure(ended: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    restarts = int(container.get("restartCount") or 0)
    code, reason = ended.get("exitCode"), ended.get("reason") or "Error"
    text = f"{reason}, exit code {code}, {restarts} restarts"
    return f"{text}: {ended['message']}" if ended.get("message") else text


def is_creating_containers(spec: Mapping[str, Any], status: Mapping[str, Any], own: str) -> bool:
    """The node has not created the pod's `own` container yet (ContainerCreating): volumes, network
    or image are missing, and only Events say which. False if an init container runs, or an error is
    known."""
    if not spec.get("nodeName") or status.get("phase", "Pending") != "Pending":
        return False
    if _runs(own_container(status, own)):
        return False
    sidecars = {
        container.get("name")
        for container in spec.get("initContainers") or ()
        if container.get("restartPolicy") == "Always"
    }
    initial: Iterable[Mapping[str, Any]] = status.get("initContainerStatuses") or ()
    init_runs = any(
        _runs(container) and container.get("name") not in sidecars for container in initial
    )
    return not init_runs and not container_error(status, own)


def creating_containers_since(
    before: Mapping[str, float], pods: Iterable[PodView], now: float
) -> dict[str, float]:
    """Since when each pod of a topology creates its containers, by uid and this process's clock."""
    return {
        p.uid: before.get(p.uid, now)
        for p in pods
        if p.topology is not None and p.creating_containers
    }


def failing_since(
    before: Mapping[str, float], pods: Iterable[PodView], now: float
) -> dict[str, float]:
    """Since when each pod of a topology has errors, by uid and this process's clock. It ends when
    it is ready: one that runs between two crashes still counts. Without standbys, which are never
    ready: what failed before one had a slot is not its task's."""
    return {
        p.uid: before.get(p.uid, now)
        for p in pods
        if p.topology is not None and p.role != ROLE_STANDBY
        if p.container_error or (p.uid in before and not p.ready)
    }
