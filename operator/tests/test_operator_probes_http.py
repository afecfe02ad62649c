"""The operator's HTTP server: probes, and clients that close early."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer

import pytest

from rekindle_operator.metrics import serve

HOST = "127.0.0.1"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Probed:
    """A server whose liveness check first does what `before_response` holds."""

    def __init__(self) -> None:
        self.before_response: Callable[[], object] = lambda: None
        self.server: ThreadingHTTPServer = serve(HOST, 0, self._alive, lambda: False)
        self.port = self.server.server_address[1]

    def _alive(self) -> bool:
        self.before_response()
        return True

    def status(self, path: str) -> int:
        connection = HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A connection that is reset when it is closed."""
        client = socket.create_connection((HOST, self.port), timeout=5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        return client

    def await_requests(self) -> None:
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(5)
                assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Probed]:
    found = Probed()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def probed(server: Probed) -> Iterator[Probed]:
    yield server
    server.before_response = lambda: None


def test_probes_respond(probed: Probed) -> None:
    found = {path: probed.status(path) for path in ("/livez", "/readyz", "/metrics", "/")}
    assert found == {"/livez": 200, "/readyz": 503, "/metrics": 200, "/": 404}


def test_a_prober_that_closes_before_the_response_leaves_no_trace(
    probed: Probed, capfd: pytest.CaptureFixture[str]
) -> None:
    client = probed.connect()
    closed = threading.Event()

    def close() -> None:
        client.close()
        closed.set()

    probed.before_response = close
    client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
    assert closed.wait(5)
    probed.await_requests()
    probed.before_response = lambda: None
    assert probed.status("/livez") == 200
    assert capfd.readouterr().err == ""


def test_a_failing_check_is_still_printed(
    probed: Probed, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    probed.before_response = fail
    with pytest.raises(ConnectionError):
        probed.status("/livez")
    probed.await_requests()
    assert "a bug" in capfd.readouterr().err
