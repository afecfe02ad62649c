"""`python -m rekindle_operator.watchdog`: replaces lost replicas of the operator."""

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
from rekindle_operator.election import CallSpan, Candidate, ElectionTiming
from rekindle_operator.lease import lease_path, read_lease
from rekindle_operator.logs import set_up_logging
from rekindle_operator.watchdog.api import ApiServer, find_access, kubelet_responds, pod_responds
from rekindle_operator.watchdog.core import (
    Observation,
    OperatorPod,
    OtherHosts,
    WatchdogTiming,
    read_pod,
    with_reused_host_ips,
)

_PROBE_TIMEOUT_S = 1.0
_MAX_EXTRA_HOSTS = 8  # that are probed to find out whether any other node responds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """The release that it watches, and how."""

    namespace: str
    helm_release: str
    lease: str  # its name
    identity: str = "watchdog"
    own_host: str = ""  # its own node, whose kubelet responds even without a network
    kubelet_port: int = 10250
    pod_port: int = 8080
    timing: WatchdogTiming = field(default_factory=WatchdogTiming)


def read_settings(env: Mapping[str, str]) -> WatchdogSettings:
    return WatchdogSettings(
        namespace=env["REKINDLE_OPERATOR_NAMESPACE"],
        helm_release=env["REKINDLE_RELEASE"],
        lease=env["REKINDLE_LEASE_NAME"],
        identity=env.get("REKINDLE_WATCHDOG_IDENTITY", "watchdog"),
        own_host=env.get("REKINDLE_WATCHDOG_HOST", ""),
    )


class Watchdog:
    def __init__(
        self,
        api: ApiServer,
        settings: WatchdogSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._clock = clock
        self._settings = settings
        timing = settings.timing
        # It never writes the Lease; the candidate measures how long it was not renewed.
        self._lease = Candidate(
            settings.identity, process="", timing=ElectionTiming(retry_s=timing.poll_s)
        )
        # Not all watchdogs delete at the same moment.
        self._delete_after_s = timing.delete_after_s + random.uniform(0, timing.jitter_s)
        self._observation = Observation()
        self._api_unreachable = False
        self._answered_at: dict[str, float] = {}  # of kubelets of other nodes; see `OtherHosts`
        self._routine_probe_at: float | None = None

    def run(self) -> None:
        """Forever."""
        while True:
            time.sleep(self.step())

    def step(self) -> float:
        """Check once, and delete lost replicas if there is no leader. Returns the pause in s."""
        timing = self._settings.timing
        try:
            self._read_lease()
            if self._lease.unchanged_s >= timing.probe_after_s:
                self._check_pods()
            elif not self._answered_at:
                self._probe_routinely()
        except (OSError, http.client.HTTPException) as error:
            if not self._api_unreachable:
                logger.warning("the API server does not respond: %s", error)
            self._api_unreachable = True
        is_renewed = self._lease.unchanged_s == 0
        return timing.poll_s if is_renewed else self._observation.pause_s(timing)

    def _read_lease(self) -> None:
        began = self._clock()
        path = lease_path(self._settings.namespace, self._settings.lease)
        # Read from the API server's cache while the Lease is renewed.
        cached = self._lease.unchanged_s == 0 and not self._observation.histories
        try:
            status, raw = self._api.call("GET", path + ("?resourceVersion=0" if cached else ""))
        except (OSError, http.client.HTTPException):
            self._lease = self._lease.after_failure(CallSpan(began, self._clock()))
            raise
        span = CallSpan(began, self._clock())
        if status not in (200, 404):
            logger.warning("the Lease cannot be read: HTTP %d %s", status, raw.get("message", ""))
            self._lease = self._lease.after_failure(span)
            return
        self._api_unreachable = False
        before = self._lease.unchanged_s
        self._lease = self._lease.after_read(read_lease(raw) if status == 200 else None, span)
        if self._lease.unchanged_s == 0:
            if before >= self._delete_after_s:
                logger.info("the operator has a leader again")
            self._observation = Observation()

    def _probe_routinely(self) -> None:
        """While the Lease is renewed: find out whether probes of kubelets work."""
        now = self._clock()
        last, pause_s = self._routine_probe_at, self._settings.timing.idle_probe_interval_s
        if last is None or now - last >= pause_s:
            self._routine_probe_at = now
            if (listed := self._list_pods()) is not None:
                self._probe(*listed, now)

    def _check_pods(self) -> None:
        listed = self._list_pods()
        if listed is None:
            self._observation = self._observation.without_responses()
            return
        pods, hosts = listed
        probed_at = self._clock()
        responses = self._probe(pods, hosts, probed_at)
        self._observation = self._observation.with_responses(pods, responses, probed_at)
        if self._lease.unchanged_s < self._delete_after_s:
            return
        by_uid = {pod.uid: pod for pod in pods}
        now, timing = self._clock(), self._settings.timing
        others = OtherHosts(hosts, self._answered_at)
        for uid in self._observation.lost(pods, now, timing, others):
            self._delete(by_uid[uid])

    def _list_pods(self) -> tuple[list[OperatorPod], set[str]] | None:
        """The operator's pods, and the addresses of all other nodes with pods of the namespace; the
        watchdog has a pod on each node. None if they cannot be listed."""
        settings = self._settings
        status, raw = self._api.call("GET", f"/api/v1/namespaces/{settings.namespace}/pods")
        if status != 200:
            logger.warning("pods cannot be listed: HTTP %d %s", status, raw.get("message", ""))
            return None
        items = raw.get("items") or ()
        hosts = {str((item.get("status") or {}).get("hostIP") or "") for item in items}
        labels = [item["metadata"].get("labels") or {} for item in items]
        matches = [
            one.get(names.LABEL_OPERATOR_DEPLOYMENT) == settings.helm_release for one in labels
        ]
        pods = with_reused_host_ips(read_pod(item) for item in items)
        operator_pods = [pod for pod, match in zip(pods, matches, strict=True) if match]
        return operator_pods, hosts - {"", settings.own_host}

    def _probe(self, pods: list[OperatorPod], hosts: set[str], now: float) -> dict[str, bool]:
        """Probe in parallel, since probes of lost nodes last until their timeout; also some of
        `hosts`."""
        responses = {pod.uid: False for pod in pods if pod.host_ip}

        def probe_kubelet(pod: OperatorPod) -> None:
            if probe_host(pod.host_ip):
                responses[pod.uid] = True

        def probe_pod(pod: OperatorPod) -> None:
            if pod.pod_ip and pod_responds(pod.pod_ip, self._settings.pod_port, _PROBE_TIMEOUT_S):
                responses[pod.uid] = True

        def probe_host(host: str) -> bool:
            responds = kubelet_responds(host, self._settings.kubelet_port, _PROBE_TIMEOUT_S)
            if responds and host != self._settings.own_host:
                self._answered_at[host] = now
            return responds

        threads = [
            threading.Thread(target=probe, args=(pod,), daemon=True)
            for pod in pods
            for probe in (probe_kubelet, probe_pod)
            if pod.uid in responses and not pod.host_ip_reused
        ]
        chosen = random.sample(sorted(hosts), min(len(hosts), _MAX_EXTRA_HOSTS))
        threads += [threading.Thread(target=probe_host, args=(h,), daemon=True) for h in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _PROBE_TIMEOUT_S)
        return dict(responses)

    def _delete(self, pod: OperatorPod) -> None:
        silence_s = self._lease.unchanged_s
        why = (
            f"the operator's Lease was not renewed for {silence_s:.0f} s, and node {pod.node} "
            + ("does not respond" if pod.accepted else "has not accepted the pod")
        )
        body = {
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod.uid, "resourceVersion": pod.version},
        }
        path = f"/api/v1/namespaces/{self._settings.namespace}/pods/{pod.name}"
        status, raw = self._api.call("DELETE", path, body)
        if status == 200:
            logger.warning("deleted pod %s of the operator: %s", pod.name, why)
            self._observation = self._observation.with_deleted(pod)
            self._write_event(pod, why)
        elif status not in (404, 409):  # deleted or changed: the next check decides
            logger.warning(
                "pod %s cannot be deleted: HTTP %d %s", pod.name, status, raw.get("message", "")
            )

    def _write_event(self, pod: OperatorPod, why: str) -> None:
        """Write an Event. A failure is only logged."""
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
            "reportingController": names.WATCHDOG_EVENT_REPORTER,
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
            status, raw = self._api.call("POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            logger.warning("an Event could not be written: %s", error)
            return
        if status >= 400:
            logger.warning(
                "an Event could not be written: HTTP %d %s", status, raw.get("message", "")
            )


def main() -> None:
    # Process 1 of a container only gets signals for which it has a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    set_up_logging(os.environ.get("REKINDLE_LOG_LEVEL", "INFO").upper())
    Watchdog(ApiServer(find_access(os.environ)), read_settings(os.environ)).run()


if __name__ == "__main__":
    main()
