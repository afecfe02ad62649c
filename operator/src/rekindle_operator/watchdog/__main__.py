"""`python -m rekindle_operator.watchdog`: what one node does for the operator."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rekindle import names
from rekindle_operator.election import Candidate, ElectionTiming, Span
from rekindle_operator.lease import lease_path, read_lease
from rekindle_operator.logs import set_up_logging
from rekindle_operator.watchdog.api import ApiServer, find_access, kubelet_answers, pod_answers
from rekindle_operator.watchdog.core import OperatorPod, Watch, WatchdogTiming, read_pod

_ANSWER_S = 1.0
_CONTROLS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the release that it watches."""

    namespace: str
    release: str
    lease: str
    identity: str = "watchdog"
    own_host: str = ""  # address of its own machine, whose kubelet it hears without a network
    kubelet_port: int = 10250
    pod_port: int = 8080
    timing: WatchdogTiming = field(default_factory=WatchdogTiming)


def read_settings(env: Mapping[str, str]) -> Settings:
    return Settings(
        namespace=env["REKINDLE_OPERATOR_NAMESPACE"],
        release=env["REKINDLE_RELEASE"],
        lease=env["REKINDLE_LEASE_NAME"],
        identity=env.get("REKINDLE_WATCHDOG_IDENTITY", "watchdog"),
        own_host=env.get("REKINDLE_WATCHDOG_HOST", ""),
    )


class Watchdog:
    def __init__(
        self,
        api: ApiServer,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._clock = clock
        self._settings = settings
        timing = settings.timing
        # It never writes; the candidate is used for how long the Lease has stood still.
        pace = ElectionTiming(retry_s=timing.poll_s)
        self._lease = Candidate(settings.identity, "", pace)
        # Not all nodes at the same moment.
        self._stale_s = timing.stale_s + random.uniform(0, timing.spread_s)
        self._watch = Watch()
        self._away = False
        self._hears = False  # kubelets of other machines have answered
        self._learned_at: float | None = None

    def run(self) -> None:
        """Until the process ends."""
        while True:
            time.sleep(self.step())

    def step(self) -> float:
        """Look once, act if nobody else does; seconds until the next look."""
        timing = self._settings.timing
        try:
            self._read_lease()
            if self._lease.unchanged_s >= timing.look_s:
                self._look()
            elif not self._hears:
                self._learn()
        except (OSError, http.client.HTTPException) as error:
            if not self._away:
                logger.warning("the API server does not answer: %s", error)
            self._away = True
        quiet = self._lease.unchanged_s == 0
        return timing.poll_s if quiet else self._watch.pause_s(timing)

    def _read_lease(self) -> None:
        began = self._clock()
        path = lease_path(self._settings.namespace, self._settings.lease)
        # Of the API server's cache, until there is a reason for more.
        cached = self._lease.unchanged_s == 0 and not self._watch.sightings
        try:
            status, raw = self._api.call("GET", path + ("?resourceVersion=0" if cached else ""))
        except (OSError, http.client.HTTPException):
            self._lease = self._lease.after_failure(Span(began, self._clock()))
            raise
        span = Span(began, self._clock())
        if status not in (200, 404):
            logger.warning("the Lease cannot be read: HTTP %d %s", status, raw.get("message", ""))
            self._lease = self._lease.after_failure(span)
            return
        self._away = False
        before = self._lease.unchanged_s
        self._lease = self._lease.after_read(read_lease(raw) if status == 200 else None, span)
        if self._lease.unchanged_s == 0:
            if before >= self._stale_s:
                logger.info("the operator's Lease is renewed again")
            self._watch = Watch()

    def _learn(self) -> None:
        """While all is well, whether kubelets can be asked at all."""
        now = self._clock()
        if self._learned_at is None or now - self._learned_at >= self._settings.timing.learn_s:
            self._learned_at = now
            self._ask(*self._list_pods())

    def _look(self) -> None:
        pods, hosts = self._list_pods()
        asked_at = self._clock()
        answers = self._ask(pods, hosts)
        self._watch = self._watch.seen(pods, answers, asked_at)
        if self._lease.unchanged_s < self._stale_s:
            return
        by_uid = {pod.uid: pod for pod in pods}
        now, timing = self._clock(), self._settings.timing
        for uid in self._watch.lost(pods, now, timing, hears=self._hears):
            self._delete(by_uid[uid])

    def _list_pods(self) -> tuple[list[OperatorPod], set[str]]:
        """The operator's, and the other machines on which the namespace has pods, as it has one of
        the watchdog on each."""
        settings = self._settings
        status, raw = self._api.call("GET", f"/api/v1/namespaces/{settings.namespace}/pods")
        if status != 200:
            logger.warning("pods cannot be listed: HTTP %d %s", status, raw.get("message", ""))
            return [], set()
        items = raw.get("items") or ()
        hosts = {str((item.get("status") or {}).get("hostIP") or "") for item in items}
        labels = [item["metadata"].get("labels") or {} for item in items]
        ours = [of.get(names.LABEL_OPERATOR) == settings.release for of in labels]
        pods = [read_pod(item) for item, is_ours in zip(items, ours, strict=True) if is_ours]
        return pods, hosts - {"", settings.own_host}

    def _ask(self, pods: list[OperatorPod], hosts: set[str]) -> dict[str, bool]:
        """Side by side: who is dead answers late. Some of `hosts` are asked as well, for as long as
        no kubelet of another machine has been heard."""
        answers = {pod.uid: False for pod in pods if pod.host_ip}

        def ask_kubelet(pod: OperatorPod) -> None:
            if kubelet_answers(pod.host_ip, self._settings.kubelet_port, _ANSWER_S):
                answers[pod.uid] = True
                self._hears |= pod.host_ip != self._settings.own_host

        def ask_pod(pod: OperatorPod) -> None:
            if pod.pod_ip and pod_answers(pod.pod_ip, self._settings.pod_port, _ANSWER_S):
                answers[pod.uid] = True

        def ask_host(host: str) -> None:
            if kubelet_answers(host, self._settings.kubelet_port, _ANSWER_S):
                self._hears = True

        asking = [
            threading.Thread(target=ask, args=(pod,), daemon=True)
            for pod in pods
            for ask in (ask_kubelet, ask_pod)
            if pod.uid in answers
        ]
        if not self._hears:
            chosen = random.sample(sorted(hosts), min(len(hosts), _CONTROLS))
            asking += [threading.Thread(target=ask_host, args=(h,), daemon=True) for h in chosen]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(2 * _ANSWER_S)
        return dict(answers)

    def _delete(self, pod: OperatorPod) -> None:
        silence_s = self._lease.unchanged_s
        why = (
            f"nobody has renewed the operator's Lease for {silence_s:.0f} s, "
            f"and node {pod.node} does not answer"
        )
        body = {
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod.uid, "resourceVersion": pod.version},
        }
        path = f"/api/v1/namespaces/{self._settings.namespace}/pods/{pod.name}"
        status, raw = self._api.call("DELETE", path, body)
        if status == 200:
            logger.warning("deleted pod %s of the operator: %s", pod.name, why)
            self._watch = self._watch.deleted(pod)
            self._tell(pod, why)
        elif status not in (404, 409):  # gone, or changed since: the next look tells
            logger.warning(
                "pod %s cannot be deleted: HTTP %d %s", pod.name, status, raw.get("message", "")
            )

    def _tell(self, pod: OperatorPod, why: str) -> None:
        """As an Event; that it cannot be written holds up nothing."""
        namespace = self._settings.namespace
        name = f"{pod.name}.{hashlib.sha256(pod.uid.encode()).hexdigest()[:16]}"
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds"),
            "type": "Warning",
            "reason": "OperatorLost",
            "action": "DeletePod",
            "note": why,
            "reportingController": names.WATCHDOG_CONTROLLER,
            "reportingInstance": self._settings.identity,
            "regarding": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": namespace,
                "name": pod.name,
                "uid": pod.uid,
            },
        }
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        try:
            self._api.call("POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            logger.warning("an Event could not be written: %s", error)


def main() -> None:
    # The first process of a container gets no signal that it has not asked for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    set_up_logging(os.environ.get("REKINDLE_LOG_LEVEL", "INFO").upper())
    Watchdog(ApiServer(find_access(os.environ)), read_settings(os.environ)).run()


if __name__ == "__main__":
    main()
