"""Stalled watches: connections that break without a reset, with real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client
from mirror_parts import pod

from rekindle_operator.cluster import mirror as mirrors
from rekindle_operator.cluster.convert import pod_view
from rekindle_operator.cluster.mirror import Mirror
from rekindle_operator.cluster.model import PodView
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

SECOND_S = 0.3
"""A second of the server's timeouts, which are whole numbers."""


class Server:
    """Lists pods; its watches send events, unless they `stall`."""

    def __init__(self) -> None:
        self.items = [pod("a", 1)]
        self.version = 1
        self.stalls = False
        self.lists = self.watches = self.events = 0
        self.ended = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def add(self, name: str) -> None:
        self.version += 1
        self.items.append(pod(name, self.version))

    def close(self) -> None:
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                if "watch" not in query:
                    server.lists += 1
                    meta = {"resourceVersion": str(server.version)}
                    body = {"kind": "PodList", "metadata": meta, "items": server.items}
                    self.wfile.write(json.dumps(body).encode())
                    return
                server.watches += 1
                self.wfile.flush()
                seen = int(query["resourceVersion"][0])
                end = time.monotonic() + SECOND_S * float(query["timeoutSeconds"][0])
                stalls = server.stalls
                while time.monotonic() < end or stalls:
                    for raw in list(server.items):
                        version = int(raw["metadata"]["resourceVersion"])
                        if version > seen and not stalls:
                            seen = version
                            server.events += 1
                            event = {"type": "ADDED", "object": raw}
                            self.wfile.write(json.dumps(event).encode() + b"\n")
                            self.wfile.flush()
                    if server.ended.wait(0.02):
                        return

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def started(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror[PodView]]:
    monkeypatch.setattr(mirrors, "_WATCH_TIMEOUT_S", 1)
    monkeypatch.setattr(mirrors, "_WATCH_READ_TIMEOUT_S", 0.6)
    configuration = client.Configuration(host=server.url)
    core = client.CoreV1Api(client.ApiClient(configuration))
    made = Mirror[PodView]("pods", core.list_pod_for_all_namespaces, pod_view, lambda: None)
    made.start()
    eventually(lambda: made.synced and server.watches)
    yield made
    server.ended.set()
    made._informer.stop()  # type: ignore[no-untyped-call]


def names(mirror: Mirror[PodView]) -> set[str]:
    return {v.name for v in mirror.views()}


def test_a_stalled_watch_is_opened_again_without_a_list(
    server: Server, started: Mirror[PodView]
) -> None:
    server.stalls = True
    watches = server.watches
    eventually(lambda: server.watches > watches)  # this one stalls
    server.stalls = False
    server.add("b")
    eventually(lambda: names(started) == {"a", "b"}, 5.0)
    assert server.lists == 1


def test_a_watch_that_is_opened_again_repeats_no_event(
    server: Server, started: Mirror[PodView]
) -> None:
    server.add("b")
    eventually(lambda: names(started) == {"a", "b"})
    watches = server.watches
    eventually(lambda: server.watches > watches + 1)
    assert server.events == 1


def test_a_mirrors_age_is_the_time_since_the_last_response(
    server: Server, started: Mirror[PodView]
) -> None:
    server.stalls = True
    watches = server.watches
    eventually(lambda: server.watches > watches)
    eventually(lambda: started.age_s > 0.5)
    server.stalls = False
    server.add("b")
    eventually(lambda: started.age_s < 0.5)


def test_a_periodic_list_corrects_what_a_watch_has_missed(
    server: Server, started: Mirror[PodView], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.items = [pod("z", 1)]  # without an event
    monkeypatch.setattr(mirrors, "_RELIST_INTERVAL_S", 0.5)
    eventually(lambda: names(started) == {"z"})
