"""Which of the operator's pods are lost, while nobody renews its Lease. Pure.

The watchdog acts only while the Lease has stood still for longer than any election takes, with an
API server that answers. Even then it deletes no more than pods whose machine does not answer: what
crashed on a living node is its kubelet's business.

Design: docs/decisions/0030.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class WatchdogTiming:
    poll_s: float = 3.0  # many watchdogs ask: one small object of the API server's cache
    quick_poll_s: float = 0.5  # once the Lease has stood still between two reads; then less often
    longest_poll_s: float = 10.0  # while nobody takes the Lease for long
    look_s: float = 2.5  # of standing still; from then on pods and kubelets are asked
    stale_s: float = 5.0  # a replica that lives has taken the Lease after 2.5 s
    silent_s: float = 2.0  # no answer from kubelet and pod
    deaf_s: float = 180.0  # the same, of who has never heard a kubelet: an operator starts in it
    learn_s: float = 300.0  # between two tries to hear one while all is well
    accept_s: float = 5.0  # bound, and its kubelet has not said a word of it
    longest_accept_s: float = 30.0  # so long for pods that follow each other
    spread_s: float = 2.0  # between the watchdogs of different nodes


_GROWTH = 1.5
_POLL_GROWTH = 1.2
_ASKED_AT_LEAST = 2


@dataclass(frozen=True, slots=True)
class OperatorPod:
    """`accepted`: the kubelet of its node has taken notice of it."""

    name: str
    uid: str
    version: str
    node: str
    accepted: bool
    host_ip: str = ""
    pod_ip: str = ""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Sighting:
    """`first`: when this process saw it bound; `silent_since`: the first question without answer
    since the last answer."""

    first: float
    silent_since: float | None = None
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """What one watchdog has seen since the Lease began to stand still. By pod uid."""

    sightings: Mapping[str, Sighting] = field(default_factory=dict)
    never_accepted: int = 0  # deleted ones
    looks: int = 0

    def seen(self, pods: Iterable[OperatorPod], answers: Mapping[str, bool], now: float) -> Watch:
        """`answers`: whether kubelet or pod answered the question that was asked at `now`; who has
        no address was not asked."""
        sightings = {}
        for pod in pods:
            known = self.sightings.get(pod.uid, Sighting(now))
            match answers.get(pod.uid):
                case True:
                    known = Sighting(known.first)
                case False:
                    since = now if known.silent_since is None else known.silent_since
                    known = Sighting(known.first, since, known.unanswered + 1)
            sightings[pod.uid] = known
        return replace(self, sightings=sightings, looks=self.looks + 1)

    def pause_s(self, timing: WatchdogTiming) -> float:
        """Until the next look, while the Lease stands still."""
        grown_s = timing.quick_poll_s * _POLL_GROWTH ** min(self.looks, 50)
        return min(grown_s, timing.longest_poll_s)

    def lost(
        self, pods: Iterable[OperatorPod], now: float, timing: WatchdogTiming, *, hears: bool
    ) -> list[str]:
        """uids of those to delete. `hears`: a kubelet of another machine has answered this process
        at some time. Where a network policy forbids that, a pod that starts is as silent as a dead
        machine."""
        silent_s = timing.silent_s if hears else timing.deaf_s
        bound = (p for p in pods if not p.ended and p.node)
        return [p.uid for p in bound if self._is_lost(p, now, timing, silent_s)]

    def _is_lost(
        self, pod: OperatorPod, now: float, timing: WatchdogTiming, silent_s: float
    ) -> bool:
        seen = self.sightings.get(pod.uid)
        if seen is None:
            return False
        if not pod.accepted:
            # The scheduler may choose a dead node for as long as Kubernetes calls it Ready.
            patience_s = timing.accept_s * _GROWTH**self.never_accepted
            return now - seen.first >= min(patience_s, timing.longest_accept_s)
        return (
            seen.silent_since is not None
            and seen.unanswered >= _ASKED_AT_LEAST
            and now - seen.silent_since >= silent_s
        )

    def deleted(self, pod: OperatorPod) -> Watch:
        return replace(self, never_accepted=self.never_accepted + (not pod.accepted))


def read_pod(raw: Mapping[str, Any]) -> OperatorPod:
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    return OperatorPod(
        name=meta["name"],
        uid=meta["uid"],
        version=meta["resourceVersion"],
        node=spec.get("nodeName") or "",
        accepted=bool(status.get("startTime")),
        host_ip=status.get("hostIP") or "",
        pod_ip=status.get("podIP") or "",
        ended=status.get("phase") in ("Succeeded", "Failed"),
    )
