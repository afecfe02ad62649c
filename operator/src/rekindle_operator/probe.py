"""Asks kubelets and pods for a sign of life: the I/O around `recovery.kubelets` and
`recovery.unreported`.

A pod is asked for its /livez, whatever it answers. The question to a kubelet is a TLS handshake,
which needs no right in the cluster. The kernel of a frozen process accepts a connection and cannot
shake hands; a dead machine does neither. The certificate is not verified, since most kubelets sign
their own: nothing is sent, and nothing is believed but that somebody answers.

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
from rekindle_operator.cluster.kubelets import TICK_S
from rekindle_operator.cluster.model import Endpoint, PodView, Snapshot
from rekindle_operator.recovery.kubelets import kubelets_to_ask
from rekindle_operator.recovery.unreported import pods_to_ask
from rekindle_operator.settings import Timing

_FAREWELL_S = 1.0

logger = logging.getLogger(__name__)


class KubeletProbe:
    """Writes what kubelets answer into the probe state of `cluster`."""

    def __init__(self, cluster: ClusterCache, timing: Timing, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._timing = timing
        self._clock = clock
        self._tls = unverified_tls()
        self._asking: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Ask until the process ends."""
        while True:
            try:
                asyncio.run(self.ask_on())
            except Exception:
                logger.exception("asking kubelets failed; it goes on")
                time.sleep(1.0)

    async def ask_on(self) -> None:
        while True:
            if self._cluster.synced:
                self._ask_those_due()
            await asyncio.sleep(TICK_S)

    def _ask_those_due(self) -> None:
        snapshot, now = self._cluster.snapshot(), self._clock()
        self._ask_pods_due(snapshot, now)
        probes = self._cluster.kubelet_probes
        probes.ticked(now)
        probes.keep({node.uid for node in snapshot.nodes})
        for node in kubelets_to_ask(snapshot, probes.open, now, self._timing):
            if node.kubelet is not None:
                probes.asked(node.uid, now)
                self._start(self._ask(node.uid, node.kubelet))

    def _ask_pods_due(self, snapshot: Snapshot, now: float) -> None:
        probes = self._cluster.pod_probes
        probes.ticked(now)
        probes.keep({pod.uid for pod in snapshot.pods if pod.is_watched})
        for pod in pods_to_ask(snapshot, probes.open, now, self._timing):
            probes.asked(pod.uid, now)
            self._start(self._ask_pod(pod))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        asking = asyncio.create_task(work)
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _ask_pod(self, pod: PodView) -> None:
        try:
            if await pod_answers(pod.ip, CONTROL_PORT, 2 * self._timing.kubelet_silent_s):
                self._cluster.pod_probes.answered(pod.uid)
        finally:
            self._cluster.pod_probes.closed(pod.uid)

    async def _ask(self, node_uid: str, kubelet: Endpoint) -> None:
        try:
            # Longer than it takes to be called silent: a late answer is one all the same.
            if await answers(kubelet, self._tls, 2 * self._timing.kubelet_silent_s):
                self._cluster.kubelet_probes.answered(node_uid)
        finally:
            self._cluster.kubelet_probes.closed(node_uid)


async def answers(kubelet: Endpoint, tls: ssl.SSLContext, within_s: float) -> bool:
    """Whether somebody who speaks TLS is there; a refusal of the handshake is an answer too."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(
                kubelet.host, kubelet.port, ssl=tls, ssl_shutdown_timeout=_FAREWELL_S
            )
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # cut off in the middle of it
        return False
    except ssl.SSLError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()  # in its own time
    return True


async def pod_answers(host: str, port: int, within_s: float) -> bool:
    """Whether its process answers at all: the kernel of a frozen one accepts the connection."""
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
