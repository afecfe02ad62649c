"""When this process first saw pods, opened gates, deletions, and changes of nodes' readiness. Pure.

The clock is this process's. A pod's creation has the time of an API server, the opening of its gate
that of the operator that led then, a node's readiness that of its kubelet: with clocks that differ
by a minute, a successor that was created just now would count as one that has waited in vain, and a
silent node would leave its quarantine at once.

Design: docs/design/kubernetes.md#time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rekindle.names import ROLE_PLACEHOLDER
from rekindle_operator.cluster.model import NodeView, PodView


@dataclass(frozen=True, slots=True)
class PodTimes:
    seen_at: float
    ungated_at: float | None = None  # when it was first seen without scheduling gates
    ending_since: float | None = None  # when it was first seen with a deletion timestamp


@dataclass(frozen=True, slots=True)
class ReadinessTime:
    transition: tuple[bool, float]  # the Ready condition and the kubelet's time of its last change
    seen_at: float


def pod_times(
    before: Mapping[str, PodTimes], pods: Iterable[PodView], now: float
) -> Mapping[str, PodTimes]:
    """By uid, for pods of topologies and of operators, and for placeholders. Others are dropped."""
    times = {}
    for pod in pods:
        if not (pod.is_managed or pod.role == ROLE_PLACEHOLDER):
            continue
        known = before.get(pod.uid, PodTimes(now))
        if known.ungated_at is None and not pod.gates:
            known = replace(known, ungated_at=now)
        if known.ending_since is None and pod.terminating:
            known = replace(known, ending_since=now)
        times[pod.uid] = known
    return times


def seen_at(times: Mapping[str, PodTimes]) -> Mapping[str, float]:
    return {uid: time.seen_at for uid, time in times.items()}


def ungated_at(times: Mapping[str, PodTimes]) -> Mapping[str, float]:
    return {uid: t.ungated_at for uid, t in times.items() if t.ungated_at is not None}


def ending_since(times: Mapping[str, PodTimes]) -> Mapping[str, float]:
    return {uid: t.ending_since for uid, t in times.items() if t.ending_since is not None}


def readiness_times(
    before: Mapping[str, ReadinessTime], nodes: Iterable[NodeView], now: float
) -> Mapping[str, ReadinessTime]:
    """By uid: when the last change of each node's Ready condition was seen."""
    times = {}
    for node in nodes:
        transition = node.ready, node.readiness_changed_at
        known = before.get(node.uid)
        same = known is not None and known.transition == transition
        times[node.uid] = known if known is not None and same else ReadinessTime(transition, now)
    return times
