"""Asks kubelets for a sign of life: the I/O around `recovery.kubelets`.

The question is a TLS handshake, which no port opened by a frozen process's kernel and no dead
machine completes, and which needs no right in the cluster. The certificate is not verified, since
most kubelets sign their own: nothing is sent, and nothing is believed but that somebody answers.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable

from rekindle_operator.cluster.model import Endpoint
from rekindle_operator.cluster.store import Cluster
from rekindle_operator.recovery.kubelets import kubelets_to_ask
from rekindle_operator.settings import Timing

_TICK_S = 0.25
_LATE_S = 2 * _TICK_S  # a tick that comes later: this process got no core, and sent nothing
_FAREWELL_S = 1.0

logger = logging.getLogger(__name__)


class KubeletProbe:
    """Puts the words of the kubelets into `cluster`; one question at a time to each."""

    def __init__(self, cluster: Cluster, timing: Timing, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._timing = timing
        self._clock = clock
        self._open: dict[str, asyncio.Task[None]] = {}  # by the node's uid
        self._tls = anyone()
        self._ticked_at = clock()

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
            await asyncio.sleep(_TICK_S)

    def _ask_those_due(self) -> None:
        now, snapshot = self._clock(), self._cluster.snapshot()
        if now - self._ticked_at > _LATE_S:
            self._cluster.excuse_kubelets()
        self._ticked_at = now
        self._cluster.forget_kubelets(snapshot.kubelets.keys() - {n.uid for n in snapshot.nodes})
        for node in kubelets_to_ask(snapshot, now, self._timing):
            if node.uid not in self._open and node.kubelet is not None:
                self._cluster.remember_question(node.uid, now)
                self._open[node.uid] = asyncio.create_task(self._ask(node.uid, node.kubelet))

    async def _ask(self, node_uid: str, kubelet: Endpoint) -> None:
        try:
            # Longer than it takes to be called silent: a late answer is one all the same.
            if await answers(kubelet, self._tls, 2 * self._timing.kubelet_silent_s):
                self._cluster.remember_answer(node_uid)
        finally:
            self._open.pop(node_uid, None)


async def answers(kubelet: Endpoint, tls: ssl.SSLContext, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(
                kubelet.host, kubelet.port, ssl=tls, ssl_shutdown_timeout=_FAREWELL_S
            )
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return False
    except ssl.SSLError:
        return True  # it refuses us, so it lives
    except (OSError, TimeoutError):
        return False
    writer.close()  # in its own time
    return True


def anyone() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
