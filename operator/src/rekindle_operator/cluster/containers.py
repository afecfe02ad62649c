"""Why a pod's containers do not run, as its kubelet reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rekindle_operator.cluster.model import PodView

_STARTING = ("", "PodInitializing", "ContainerCreating")
_MAX_MESSAGE_CHARS = 300


def container_error(status: Mapping[str, Any]) -> str:
    """Error of a container that waits with one, or that failed and has not restarted yet. Empty
    while all run, or start for the first time."""
    if status.get("phase") in ("Succeeded", "Failed"):
        return ""
    for kind in ("initContainerStatuses", "containerStatuses"):
        containers: Iterable[Mapping[str, Any]] = status.get(kind) or ()
        for container in containers:
            if reason := _error_of(container):
                return f"container {container.get('name', '?')}: {reason}"[:_MAX_MESSAGE_CHARS]
    return ""


def _error_of(container: Mapping[str, Any]) -> str:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    if container.get("ready") or "running" in state:
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


def is_creating_containers(spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """The node has created no container yet (ContainerCreating): volumes, network or image are
    missing, and only Events say which. False if an init container runs, or a container reports an
    error."""
    if not spec.get("nodeName") or status.get("phase", "Pending") != "Pending":
        return False
    sidecars = {
        container.get("name")
        for container in spec.get("initContainers") or ()
        if container.get("restartPolicy") == "Always"
    }
    initial: Iterable[Mapping[str, Any]] = status.get("initContainerStatuses") or ()
    init_runs = any(
        "running" in (container.get("state") or {}) and container.get("name") not in sidecars
        for container in initial
    )
    return not init_runs and not container_error(status)


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
    the pod is Ready: one that runs between two crashes still counts."""
    return {
        p.uid: before.get(p.uid, now)
        for p in pods
        if p.topology is not None and (p.container_error or (p.uid in before and not p.ready))
    }
