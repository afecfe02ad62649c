"""Timestamps of the phases of pods of coordinators and of the operator. Pure.

The clock is this process's: timestamps of other machines (a pod's creation, its binding) would make
a new coordinator look late if clocks differ by a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rekindle.names import ROLE_COORDINATOR
from rekindle_operator.cluster.model import PodView


@dataclass(frozen=True, slots=True)
class PhaseTime:
    phase: str
    since: float  # by the clock of this process


def phase_times(
    before: Mapping[str, PhaseTime], pods: Iterable[PodView], now: float
) -> Mapping[str, PhaseTime]:
    """By uid, for coordinators and pods of the operator that have a node. Others are dropped."""
    times = {}
    for pod in pods:
        if pod.node is not None and (pod.role == ROLE_COORDINATOR or pod.helm_release):
            known = before.get(pod.uid)
            same = known is not None and known.phase == pod.phase
            times[pod.uid] = known if known is not None and same else PhaseTime(pod.phase, now)
    return times
