"""HTTP server of the operator: Prometheus metrics and health checks.

Design: docs/operations.md#metrics-and-logs.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import nan
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

from rekindle.names import GATE, ROLE_TASK
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.topology_status import QueryState

RECONCILE_SECONDS = Histogram(
    "rekindle_operator_reconcile_seconds",
    "Duration of a reconcile pass over all topologies, with its actions",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RECONCILE_ERRORS = Counter(
    "rekindle_operator_reconcile_errors",
    "Passes, or topologies of a pass, that failed with an exception",
)
ACTIONS = Counter("rekindle_operator_actions", "Executed actions by kind", ["kind"])
LEADER = Gauge("rekindle_operator_leader", "1 while this replica is the leader, else 0")
PODS = Gauge("rekindle_operator_task_pods", "Task pods by state", ["state"])
NODES = Gauge("rekindle_operator_nodes", "Nodes by state", ["state"])
QUERIES = Gauge(
    "rekindle_operator_queries", "Queries of a topology by state", ["topology", "state"]
)
RECOVERY_SECONDS = Histogram(
    "rekindle_operator_recovery_seconds",
    "Time from the loss until all queries were live again; mode of the recovery: "
    "Progressive (by priority), Blocking (all queries together)",
    ["mode"],
    buckets=(1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800),
)

MIRROR_AGE_SECONDS = Gauge(
    "rekindle_operator_mirror_age_seconds",
    "Time since the last response or event of the API server for a kind of object",
    ["kind"],
)
CRD_MISSING_FIELDS = Gauge(
    "rekindle_operator_crd_missing_fields",
    "Fields that this operator's CRD has and the API server's does not; NaN: not known yet",
)
CRD_MISSING_FIELDS.set(nan)
REPORT_AGE_SECONDS = Gauge(
    "rekindle_operator_report_age_seconds",
    "Time since the coordinator's report of a topology was last known to be true",
    ["topology"],
)


def observe(snapshot: Snapshot) -> None:
    """Set gauges from the snapshot. Series of deleted topologies are removed."""
    states = Tally(_pod_state(p) for p in snapshot.pods if p.role == ROLE_TASK)
    for state in ("gated", "open", "bound", "ended"):
        PODS.labels(state).set(states[state])
    ready = sum(node.ready for node in snapshot.nodes)
    NODES.labels("ready").set(ready)
    NODES.labels("not_ready").set(len(snapshot.nodes) - ready)
    QUERIES.clear()
    for topology in snapshot.topologies:
        queries = Tally(q.state for q in topology.operator_status.queries.values())
        for state in QueryState:
            QUERIES.labels(topology.key, state).set(queries[state])


def observe_ages(snapshot: Snapshot, mirrors: Mapping[str, float], now: float) -> None:
    for kind, age_s in mirrors.items():
        MIRROR_AGE_SECONDS.labels(kind).set(age_s)
    REPORT_AGE_SECONDS.clear()
    for topology in snapshot.topologies:
        if (as_of := snapshot.report_times.get(topology.uid)) is not None:
            REPORT_AGE_SECONDS.labels(topology.key).set(now - as_of)


def _pod_state(pod: PodView) -> str:
    if pod.ended:
        return "ended"
    if pod.node is not None:
        return "bound"
    return "gated" if GATE in pod.gates else "open"


def serve(
    bind: str, port: int, alive: Callable[[], bool], ready: Callable[[], bool]
) -> ThreadingHTTPServer:
    """Serve /metrics, /livez and /readyz from a background thread."""

    class MetricsHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/metrics":
                    self._respond(200, generate_latest(), CONTENT_TYPE_LATEST)
                case "/livez":
                    self._respond(*((200, b"ok\n") if alive() else (503, b"stuck\n")))
                case "/readyz":
                    self._respond(*((200, b"ok\n") if ready() else (503, b"not synced\n")))
                case _:
                    self._respond(404, b"/metrics, /livez, /readyz\n")

        def _respond(self, code: int, body: bytes, kind: str = "text/plain") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    class MetricsServer(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A prober that has closed its connection, at its timeout, is no error."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    server = MetricsServer((bind, port), MetricsHandler)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
