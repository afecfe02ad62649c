"""Documents of a topology in a real cluster, and an API server that serves them.

`status_documents.json` was read from the embedded cluster while the flights example started, lost
six of nine nodes, and came back; it holds the parts that the command line reads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology

DOCUMENTS = Path(__file__).with_name("status_documents.json")
TOPOLOGIES = "/apis/rekindle.dev/v1alpha1/namespaces/default/streamtopologies"


class Observed:
    """What kubectl shows of the flights example at one moment of a run on the embedded cluster;
    tests may change it. "running": after the recovery."""

    def __init__(self, moment: str) -> None:
        raw = json.loads(DOCUMENTS.read_text())[moment]
        self.now = datetime.fromtimestamp(raw["now"], UTC)
        self.topology: dict[str, Any] = raw["topology"]
        self.pods: list[dict[str, Any]] = raw["pods"]
        self.events: list[dict[str, Any]] = raw["events"]
        self.nodes: list[dict[str, Any]] = raw["nodes"]

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.topology["status"]
        return found

    def compiled(self) -> Topology:
        return compile_topology(load_spec(self.topology["spec"]), "flights")


class FakeApiServer:
    """Responds with the snapshot; `refuses` maps a path to a status code. `on_topology_read` is
    called before each response with the topology, with the number of its reads so far."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.refuses: dict[str, int] = {}
        self.requested: list[str] = []
        self.tokens: set[str | None] = set()
        self.on_topology_read: Callable[[int], None] = lambda number: None

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        self.requested.append(path)
        if path in self.refuses:
            return self.refuses[path], {"kind": "Status", "message": "you may not read this"}
        if path == f"{TOPOLOGIES}/flights":
            self.on_topology_read(self.requested.count(path))
            return 200, self.observed.topology
        items = {
            "/api/v1/namespaces/default/events": self.observed.events,
            "/api/v1/namespaces/default/pods": self.observed.pods,
            "/api/v1/nodes": self.observed.nodes,
        }
        if path in items:
            return 200, {"kind": "List", "items": items[path]}
        return 404, {"kind": "Status", "message": "not found"}


@contextmanager
def served(api: FakeApiServer, directory: Path) -> Iterator[Path]:
    """A kubeconfig for the API server behind a real socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            api.tokens.add(self.headers.get("Authorization"))
            status, body = api.answer(url.path, parse_qs(url.query))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield kubeconfig(directory, f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig(directory: Path, server: str) -> Path:
    """Its current context is of another cluster; `test` is of `server`."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "elsewhere",
        "clusters": [
            {"name": "here", "cluster": {"server": server}},
            {"name": "there", "cluster": {"server": "http://127.0.0.1:1"}},
        ],
        "users": [{"name": "me", "user": {"token": "secret"}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "here", "user": "me"}},
            {"name": "streams", "context": {"cluster": "here", "user": "me", "namespace": "s"}},
            {"name": "elsewhere", "context": {"cluster": "there", "user": "me"}},
        ],
    }
    file = directory / "kubeconfig"
    file.write_text(yaml.safe_dump(document))
    return file
