"""Health probes of kubelets and pods: the I/O around `recovery.kubelets` and `recovery.probed_pods`
(one pod of each node at intervals; more while no coordinator reports on them).

A pod is probed with a request for its /livez; any response counts. A kubelet is probed with a TLS
handshake, which needs no permission in the cluster. The kernel of a frozen process accepts a
connection but does not complete the handshake; a dead machine does neither. The certificate is not
verified, since most kubelets sign their own: nothing is sent, and only the response itself counts.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rekindle.protocol import CONTROL_PORT
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.model import NodeView, PodEndpoint, PodView, without_forged
from rekindle_operator.cluster.probes import TICK_S
from rekindle_operator.recovery.kubelets import kubelets_to_probe
from rekindle_operator.recovery.probed_pods import pods_to_probe
from rekindle_operator.settings import Timing

_CLOSE_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class HealthProber:
    """Sends probes, and writes the responses into the probe states of `cluster`."""

    def __init__(self, cluster: ClusterCache, timing: Timing, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._timing = timing
        self._clock = clock
        self._tls = unverified_tls()
        self._running: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Probe until the process ends."""
        while True:
            try:
                asyncio.run(self.probe_forever())
            except Exception:
                logger.exception("probing kubelets and pods failed; trying again")
                time.sleep(1.0)

    async def probe_forever(self) -> None:
        while True:
            if self._cluster.synced:
                self._probe_due()
            await asyncio.sleep(TICK_S)

    def _probe_due(self) -> None:
        now = self._clock()
        pods, nodes = start_due_probes(self._cluster, now, self._timing)
        for pod in pods:
            self._start(self._probe_pod(pod, now))
        for node in nodes:
            if node.kubelet is not None:
                self._start(self._probe_kubelet(node.uid, node.kubelet, now))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        probe = asyncio.create_task(work)
        self._running.add(probe)
        probe.add_done_callback(self._running.discard)

    async def _probe_pod(self, pod: PodView, sent_at: float) -> None:
        try:
            if await pod_responds(pod.ip, CONTROL_PORT, 2 * self._timing.kubelet_silent_s):
                self._cluster.pod_probes.responded(pod.uid, sent_at)
        finally:
            self._cluster.pod_probes.ended(pod.uid, sent_at)

    async def _probe_kubelet(self, node_uid: str, kubelet: PodEndpoint, sent_at: float) -> None:
        try:
            # Longer than the timeout of silence: a late response still counts.
            if await kubelet_responds(kubelet, self._tls, 2 * self._timing.kubelet_silent_s):
                self._cluster.kubelet_probes.responded(node_uid, sent_at)
        finally:
            self._cluster.kubelet_probes.ended(node_uid, sent_at)


def start_due_probes(
    cluster: ClusterCache, now: float, timing: Timing
) -> tuple[list[PodView], list[NodeView]]:
    """The pods and kubelets to probe now; they are recorded as sent. Forged pods are not probed, as
    their responses do not count."""
    snapshot = without_forged(cluster.snapshot())
    for probes in (cluster.pod_probes, cluster.kubelet_probes):
        if probes.reset_after_pause(now):
            cluster.observe_anew()
    cluster.pod_probes.retain({pod.uid for pod in snapshot.pods if pod.is_managed})
    local = {node.uid for node in snapshot.nodes if node.name == snapshot.own_node}
    cluster.kubelet_probes.retain({node.uid for node in snapshot.nodes}, local=local)
    pods = pods_to_probe(snapshot, cluster.pod_probes.busy(now), now, timing)
    nodes = kubelets_to_probe(snapshot, cluster.kubelet_probes.busy(now), now, timing)
    for pod in pods:
        cluster.pod_probes.sent(pod.uid, now)
    for node in nodes:
        cluster.kubelet_probes.sent(node.uid, now)
    return pods, nodes


async def kubelet_responds(kubelet: PodEndpoint, tls: ssl.SSLContext, within_s: float) -> bool:
    """Whether a TLS server is there; a refused handshake is a response too."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(
                kubelet.host, kubelet.port, ssl=tls, ssl_shutdown_timeout=_CLOSE_TIMEOUT_S
            )
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # the connection broke during it
        return False
    except ssl.SSLError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()  # without waiting
    return True


async def pod_responds(host: str, port: int, within_s: float) -> bool:
    """Whether its process responds: the kernel of a frozen process only accepts the connection."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    f"GET /livez HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                return bool(await reader.read(1))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def unverified_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
