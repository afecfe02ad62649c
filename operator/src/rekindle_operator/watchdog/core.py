"""Which of the operator's pods are lost, while no replica renews its Lease. Pure.

The watchdog acts only if the Lease was not renewed for longer than an election takes, while the API
server responds. Even then it only deletes pods whose node does not respond: a pod that crashed on a
good node is restarted by its kubelet.

Design: docs/decisions/0030.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class WatchdogTiming:
    poll_s: float = 3.0  # there are many watchdogs; the read is served from the API server's cache
    quick_poll_s: float = 0.5  # after the Lease was unchanged between two reads; then growing
    longest_poll_s: float = 10.0  # if no replica takes the Lease for long
    probe_after_s: float = 2.5  # without renewal; from then on pods and kubelets are probed
    delete_after_s: float = 5.0  # a running replica takes the Lease after 2.5 s
    silent_s: float = 2.0  # neither kubelet nor pod responds
    unproven_silent_s: float = (
        180.0  # the same if no other kubelet responds; longer than an operator's start
    )
    idle_probe_interval_s: float = (
        300.0  # between two probes while the Lease is renewed, if none got a response yet
    )
    accept_s: float = 5.0  # after binding, until the kubelet must have accepted the pod
    longest_accept_s: float = 30.0  # at most, as it grows with each deleted pod
    jitter_s: float = 2.0  # random delay, different on each node


_ACCEPT_GROWTH = 1.5
_POLL_GROWTH = 1.2
_MIN_PROBES = 2
# After so long without a probe a silence begins anew. Longer than two of the longest pauses (10 s)
# with a round between them that failed.
_GAP_S = 30.0


@dataclass(frozen=True, slots=True)
class OperatorPod:
    """`accepted`: the kubelet of its node has started to handle it. `ready`: as its kubelet has
    reported last, so also on a node that is dead since then. `host_ip_reused`: another
    node has the address of its node now, so a response from there would not be of its node."""

    name: str
    uid: str
    version: str  # resourceVersion
    node: str
    accepted: bool
    host_ip: str = ""
    pod_ip: str = ""
    ended: bool = False
    ready: bool = False
    created: str = ""  # RFC 3339, as the API server wrote it
    host_ip_reused: bool = False


@dataclass(frozen=True, slots=True)
class PodHistory:
    """`bound_since`: when this process first saw it bound to a node; None while it was not.
    `ready_since`: the same of a pod that is ready. `silent_since`: the first probe without a
    response since the last response."""

    bound_since: float | None = None
    ready_since: float | None = None
    silent_since: float | None = None
    unanswered: int = 0  # probes in a row

    def without_probes(self) -> PodHistory:
        return replace(self, silent_since=None, unanswered=0)


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """Addresses of all other nodes. `answered_at`: of those whose kubelets have responded at some
    time, when the newest probe with a response was sent."""

    addresses: Set[str]
    answered_at: Mapping[str, float]

    def respond(self, besides: str, since: float) -> bool:
        """Whether one of them has responded to a probe that was sent after that: otherwise it may
        be this process that reaches none, or a policy that blocks probes. If there is no node
        besides that one, whether any has ever responded."""
        others = self.addresses - {besides}
        if not others:
            return bool(self.answered_at)
        return any(self.answered_at.get(host, -inf) > since for host in others)


@dataclass(frozen=True, slots=True)
class Observation:
    """What this watchdog has seen since the last renewal of the Lease. Histories by pod uid."""

    histories: Mapping[str, PodHistory] = field(default_factory=dict)
    never_accepted: int = 0  # deleted pods that no kubelet had accepted
    checks: int = 0  # rounds of probes, also those for which pods could not be listed
    probed_at: float | None = None  # the last round

    def with_responses(
        self, pods: Iterable[OperatorPod], responses: Mapping[str, bool], now: float
    ) -> Observation:
        """`responses`: whether the kubelet or the pod responded to the probe of `now`; none of pods
        without an address, which are not probed."""
        histories = {}
        is_gap = self.probed_at is not None and now - self.probed_at > _GAP_S
        for pod in pods:
            known = self.histories.get(pod.uid, PodHistory())
            if is_gap:
                known = replace(known.without_probes(), ready_since=None)
            if known.bound_since is None and pod.node:
                known = replace(known, bound_since=now)
            if known.ready_since is None or not pod.ready:
                known = replace(known, ready_since=now if pod.ready else None)
            match responses.get(pod.uid):
                case True:
                    known = known.without_probes()
                case False:
                    since = now if known.silent_since is None else known.silent_since
                    known = replace(known, silent_since=since, unanswered=known.unanswered + 1)
            histories[pod.uid] = known
        return replace(self, histories=histories, checks=self.checks + 1, probed_at=now)

    def without_responses(self) -> Observation:
        """After a round in which pods could not be listed."""
        return replace(self, checks=self.checks + 1)

    def pause_s(self, timing: WatchdogTiming) -> float:
        """Until the next check, while the Lease is not renewed."""
        grown_s = timing.quick_poll_s * _POLL_GROWTH ** min(self.checks, 50)
        return min(grown_s, timing.longest_poll_s)

    def lost(
        self, pods: Iterable[OperatorPod], now: float, timing: WatchdogTiming, others: OtherHosts
    ) -> list[str]:
        """uids of the pods to delete. If no other kubelet responds, a pod that starts looks like a
        lost node, so silence must last longer."""
        bound = (p for p in pods if not p.ended and p.node)
        return [p.uid for p in bound if self._is_lost(p, now, timing, others)]

    def _is_lost(
        self, pod: OperatorPod, now: float, timing: WatchdogTiming, others: OtherHosts
    ) -> bool:
        history = self.histories.get(pod.uid)
        if history is None or history.bound_since is None:
            return False
        if not pod.accepted:
            # The scheduler may choose a lost node for as long as it is reported Ready.
            timeout_s = timing.accept_s * _ACCEPT_GROWTH**self.never_accepted
            return now - history.bound_since >= min(timeout_s, timing.longest_accept_s)
        since = history.silent_since
        if since is None or history.unanswered < _MIN_PROBES:
            return False
        # One that has been ready for longer than an election takes does not start, and would lead:
        # then all other nodes may be dead.
        ready_since = inf if history.ready_since is None else history.ready_since
        is_proven = others.respond(besides=pod.host_ip, since=since) or (
            now - ready_since >= timing.delete_after_s and bool(others.answered_at)
        )
        return now - since >= (timing.silent_s if is_proven else timing.unproven_silent_s)

    def with_deleted(self, pod: OperatorPod) -> Observation:
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
        ready=_is_ready(status.get("containerStatuses") or ()),
        created=meta.get("creationTimestamp") or "",
    )


def _is_ready(containers: Sequence[Mapping[str, Any]]) -> bool:
    """All of them: a webhook may have added some that start sooner."""
    return bool(containers) and all(c.get("ready") for c in containers)


def with_reused_host_ips(pods: Iterable[OperatorPod]) -> list[OperatorPod]:
    """The same pods; `host_ip_reused` if a newer one, on another node, has the same host IP."""
    pods = list(pods)
    newest = {p.host_ip: p.node for p in sorted(pods, key=lambda p: p.created)}
    return [
        replace(p, host_ip_reused=bool(p.host_ip) and newest[p.host_ip] != p.node) for p in pods
    ]
