"""What counts as a response of a kubelet, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kubelet_parts import node, task
from kubernetes import client

from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.model import NodeView, PodEndpoint, ProbeResults, Snapshot
from rekindle_operator.probe import HealthProber, kubelet_responds, unverified_tls
from rekindle_operator.settings import Timing

Serve = Callable[[Callable[[socket.socket], object]], PodEndpoint]


@pytest.fixture(scope="session")
def server_tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """Signed by itself, as most kubelets' certificates are."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=a", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    return context


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Hands each connection to a function, in a thread that ends with the test."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(handle: Callable[[socket.socket], object]) -> PodEndpoint:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    handle(connection)

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
        return PodEndpoint(*listener.getsockname())

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def shake_hands(tls: ssl.SSLContext) -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        try:
            with tls.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)
        except OSError:
            pass  # as in a kubelet: the next connection may succeed

    return handle


def probe(endpoint: PodEndpoint, within_s: float = 5.0) -> bool:
    return asyncio.run(kubelet_responds(endpoint, unverified_tls(), within_s))


def test_a_handshake_is_a_response(serve: Serve, server_tls: ssl.SSLContext) -> None:
    assert probe(serve(shake_hands(server_tls)))


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_refusal_of_the_client_certificate_is_a_response(
    serve: Serve, server_tls: ssl.SSLContext, newest: ssl.TLSVersion
) -> None:
    server_tls.verify_mode, server_tls.maximum_version = ssl.CERT_REQUIRED, newest
    try:
        assert probe(serve(shake_hands(server_tls)))
    finally:
        server_tls.verify_mode = ssl.CERT_NONE
        server_tls.maximum_version = ssl.TLSVersion.MAXIMUM_SUPPORTED


def test_an_open_port_that_sends_nothing_is_no_response(serve: Serve) -> None:
    """What the kernel does for a process that is frozen."""
    done = threading.Event()
    try:
        assert not probe(serve(lambda _: done.wait(10)), within_s=0.3)
    finally:
        done.set()


def test_a_closed_connection_or_port_is_no_response(serve: Serve) -> None:
    assert not probe(serve(lambda connection: connection.close()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = PodEndpoint(*listener.getsockname())
    assert not probe(gone)


class OneNode(ClusterCache):
    """A cache whose mirrors hold one node and its task."""

    def __init__(self, only: NodeView) -> None:
        super().__init__(client.ApiClient(), None, time.time)
        self.only = only

    @property
    def synced(self) -> bool:
        return True

    def snapshot(self) -> Snapshot:
        known = super().snapshot()
        return Snapshot(
            nodes=(self.only,), pods=(task(0, "a"),), kubelet_probes=known.kubelet_probes
        )


def results_after(cluster: ClusterCache, settled: Callable[[ProbeResults], bool]) -> ProbeResults:
    """What is known of the node, once it is `settled`."""
    prober = HealthProber(cluster, Timing(), time.time)

    async def follow() -> ProbeResults:
        probing = asyncio.create_task(prober.probe_forever())
        try:
            async with asyncio.timeout(10):
                while True:
                    results = cluster.snapshot().kubelet_probes.get("uid-a")
                    if results is not None and settled(results):
                        return results
                    await asyncio.sleep(0.01)
        finally:
            probing.cancel()

    return asyncio.run(follow())


def test_the_cache_records_who_responded(serve: Serve, server_tls: ssl.SSLContext) -> None:
    began = time.time()
    cluster = OneNode(node("a", kubelet=serve(shake_hands(server_tls))))
    results = results_after(cluster, lambda results: results.answered_probe_at is not None)
    assert results.unanswered_since is None
    assert began <= results.sent_at == results.answered_probe_at


def test_the_cache_records_silence_and_forgets_removed_nodes(serve: Serve) -> None:
    cluster = OneNode(node("a", kubelet=serve(lambda connection: connection.close())))
    cluster.kubelet_probes.sent("uid-gone", time.time())
    results = results_after(cluster, lambda results: results.unanswered_since is not None)
    assert results.answered_probe_at is None
    assert cluster.snapshot().kubelet_probes.keys() == {"uid-a"}
