"""The API server as a fuzz run uses it: sends texts unchanged, also those that are no valid
objects, and follows every version of each topology."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import config

from rekindle import names
from rekindle_testing.fuzz.verdict import verdict

NAMESPACE = "fuzz"
TOPOLOGIES = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_JSON = {"Content-Type": "application/json"}
_MERGE = {"Content-Type": "application/merge-patch+json"}
_TIMEOUT_S = 30.0
_WATCH_S = 600


class Api:
    def __init__(self, kubeconfig: Path) -> None:
        client = config.new_client_from_config(str(kubeconfig))  # type: ignore[no-untyped-call]
        self._url = client.configuration.host
        self._pool: urllib3.PoolManager = client.rest_client.pool_manager

    def send(
        self, method: str, path: str, body: str | None = None, *, strict: bool = False
    ) -> tuple[int, Any]:
        """(status, the object or the error)."""
        response = self._pool.request(
            method,
            f"{self._url}{path}" + ("?fieldValidation=Strict" if strict else ""),
            body=body,
            headers=_MERGE if method == "PATCH" else _JSON,
            timeout=_TIMEOUT_S,
            retries=False,
        )
        return response.status, json.loads(response.data)

    def get(self, path: str) -> Any:
        return self.send("GET", path)[1]

    def watch(self, path: str, version: str) -> urllib3.BaseHTTPResponse:
        query = f"watch=1&resourceVersion={version}&timeoutSeconds={_WATCH_S}"
        return self._pool.request(
            "GET",
            f"{self._url}{path}?{query}",
            preload_content=False,
            timeout=urllib3.Timeout(connect=_TIMEOUT_S, read=_WATCH_S + 5),
            retries=False,
        )


@dataclass(slots=True)
class WatchedTopology:
    """A topology: its newest version, how often it changed, and when (monotonic)."""

    topology: Mapping[str, Any]
    changed_at: float
    validated_at: dict[int, float] = field(default_factory=dict)  # by generation
    changes: int = 0


class Watcher:
    """Follows all topologies of the namespace."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._seen: dict[str, WatchedTopology] = {}  # by uid
        self._closed = False
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="fuzz-watch")
        self._thread.start()

    def close(self) -> None:
        self._closed = True

    def seen(self, uid: str) -> WatchedTopology | None:
        with self._lock:
            return self._seen.get(uid)

    def all(self) -> dict[str, WatchedTopology]:
        with self._lock:
            return dict(self._seen)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._follow()
        except Exception as error:
            self.error = repr(error)

    def _follow(self) -> None:
        listed = self._api.get(TOPOLOGIES)
        with self._lock:
            self._seen = {
                uid: seen
                for uid, seen in self._seen.items()
                if uid in {item["metadata"]["uid"] for item in listed["items"]}
            }
        for item in listed["items"]:
            self._put(item)
        response = self._api.watch(TOPOLOGIES, listed["metadata"]["resourceVersion"])
        rest = b""
        for chunk in response.stream(amt=None):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR" or self._closed:
                    return
                if event["type"] == "DELETED":
                    with self._lock:
                        self._seen.pop(event["object"]["metadata"]["uid"], None)
                else:
                    self._put(event["object"])

    def _put(self, topology: Mapping[str, Any]) -> None:
        now, meta = time.monotonic(), topology["metadata"]
        with self._lock:
            seen = self._seen.setdefault(meta["uid"], WatchedTopology(topology, now))
            if seen.topology["metadata"]["resourceVersion"] != meta["resourceVersion"]:
                seen.topology, seen.changed_at = topology, now
                seen.changes += 1
            if verdict(topology) is not None:
                seen.validated_at.setdefault(meta["generation"], now)
