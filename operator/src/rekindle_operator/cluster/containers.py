"""Why a pod's containers do not run, in the kubelet's words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rekindle_operator.cluster.model import PodView

_STARTING = ("", "PodInitializing", "ContainerCreating")
_MESSAGE_LIMIT = 300


def container_trouble(status: Mapping[str, Any]) -> str:
    """Empty while it runs or starts for the first time: a container that waits with a reason, or
    that has ended with a failure and was not started again yet."""
    if status.get("phase") in ("Succeeded", "Failed"):
        return ""
    for kind in ("initContainerStatuses", "containerStatuses"):
        containers: Iterable[Mapping[str, Any]] = status.get(kind) or ()
        for container in containers:
            if said := _trouble(container):
                return f"container {container.get('name', '?')}: {said}"[:_MESSAGE_LIMIT]
    return ""


def _trouble(container: Mapping[str, Any]) -> str:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    if container.get("ready") or "running" in state:
        return ""
    waiting, ended = state.get("waiting"), state.get("terminated") or last.get("terminated")
    failed = _ending(ended, container) if ended and ended.get("exitCode") != 0 else ""
    if waiting and waiting.get("reason", "") not in _STARTING:
        said = ": ".join(str(waiting[k]) for k in ("reason", "message") if waiting.get(k))
        return f"{said} (last: {failed})" if failed else said
    return failed


def _ending(ended: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    restarts = int(container.get("restartCount") or 0)
    code, reason = ended.get("exitCode"), ended.get("reason") or "Error"
    said = f"{reason}, exit code {code}, {restarts} restarts"
    return f"{said}: {ended['message']}" if ended.get("message") else said


def is_preparing(spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Its node has yet to make a container: volumes, network or image are not there, and no
    container says why. Only Events tell which. An init container that works is none of that."""
    if not spec.get("nodeName") or status.get("phase", "Pending") != "Pending":
        return False
    sidecars = {
        container.get("name")
        for container in spec.get("initContainers") or ()
        if container.get("restartPolicy") == "Always"
    }
    initial: Iterable[Mapping[str, Any]] = status.get("initContainerStatuses") or ()
    works = any(
        "running" in (container.get("state") or {}) and container.get("name") not in sidecars
        for container in initial
    )
    return not works and not container_trouble(status)


def preparing_since(
    before: Mapping[str, float], pods: Iterable[PodView], now: float
) -> dict[str, float]:
    """By uid of our pods, since when without a pause: by this process's clock."""
    return {p.uid: before.get(p.uid, now) for p in pods if p.topology is not None and p.preparing}


def troubled_since(
    before: Mapping[str, float], pods: Iterable[PodView], now: float
) -> dict[str, float]:
    """By uid of our pods, since when: by this process's clock, and until it is Ready. One that
    runs between two crashes is still in trouble."""
    return {
        p.uid: before.get(p.uid, now)
        for p in pods
        if p.topology is not None and (p.trouble or (p.uid in before and not p.ready))
    }
