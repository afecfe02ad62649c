"""What an administrator does with a Node through the API server: get, cordon, drain, delete.

`JsonApi` is HTTPS without a client library; tests use it for other objects too.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.errors import EmbeddedError

Json = dict[str, Any]

_POLL_S = 0.1


class ApiRefusal(EmbeddedError):
    """The API server refused; `status` is the HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class JsonApi:
    """The API server, with the permissions of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._connection: tuple[str, ssl.SSLContext] | None = None

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        content: Json = json.loads(self.text(path, method, body))
        return content

    def text(self, path: str, method: str = "GET", body: Json | None = None) -> str:
        with self._open(path, method, body) as response:
            content: bytes = response.read()
            return content.decode()

    def lines(self, path: str) -> Iterator[str]:
        """Lines of a streaming response, as they arrive."""
        with self._open(path, "GET", None) as response:
            for line in response:
                yield line.decode().removesuffix("\n")

    def _open(self, path: str, method: str, body: Json | None) -> Any:
        server, context = self._connect()
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": content_type, "Accept": "application/json, */*"},
        )
        try:
            return urllib.request.urlopen(request, timeout=10, context=context)
        except urllib.error.HTTPError as error:
            content = error.read().decode(errors="replace")
            raise ApiRefusal(error.code, _message_of(content)) from error

    def _connect(self) -> tuple[str, ssl.SSLContext]:
        if self._connection is None:
            document = json.loads(self._kubeconfig.read_text())
            cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
            ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
            context = ssl.create_default_context(cadata=ca)
            # The ssl module reads certificates from files only.
            with tempfile.NamedTemporaryFile(suffix=".pem") as pair:
                for field in ("client-certificate-data", "client-key-data"):
                    pair.write(base64.b64decode(user[field]))
                pair.flush()
                context.load_cert_chain(pair.name)
            self._connection = cluster["server"], context
        return self._connection


def _message_of(content: str) -> str:
    """The message of a Status; other content unchanged."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content


class NodeAdmin:
    """One Node, with the permissions of `kubeconfig`."""

    def __init__(self, name: str, kubeconfig: Path) -> None:
        self.name = name
        self._path = f"/api/v1/nodes/{name}"
        self._api = JsonApi(kubeconfig)

    def is_ready(self) -> bool:
        return self.conditions().get("Ready") == "True"

    def exists(self) -> bool:
        return self._get() is not None

    def conditions(self) -> dict[str, str]:
        """Type to status; empty while there is no such Node."""
        status = (self._get() or {}).get("status", {})
        return {c["type"]: c["status"] for c in status.get("conditions", [])}

    def pods(self) -> list[Json]:
        """Bound to the node, of all namespaces."""
        query = f"?fieldSelector=spec.nodeName%3D{self.name}"
        items: list[Json] = self._api.call("GET", f"/api/v1/pods{query}")["items"]
        return items

    def cordon(self) -> None:
        self._api.call("PATCH", self._path, {"spec": {"unschedulable": True}})

    def drain(self, timeout_s: float) -> None:
        self.cordon()
        deadline = time.monotonic() + timeout_s
        while remaining := [pod for pod in self.pods() if not _is_of_daemon_set(pod)]:
            for pod in remaining:
                if "deletionTimestamp" not in pod["metadata"]:
                    self._evict(pod)
            if time.monotonic() > deadline:
                names = [pod["metadata"]["name"] for pod in remaining]
                raise EmbeddedError(f"{timeout_s:g} s passed and {self.name} still has {names}")
            time.sleep(_POLL_S)

    def delete(self, *, best_effort: bool = False) -> None:
        """`best_effort`: no error if there is no such Node, or the API server does not respond."""
        try:
            self._api.call("DELETE", self._path)
        except ApiRefusal as error:
            if error.status != 404 or not best_effort:
                raise
        except OSError:
            # A control plane that was stopped before its nodes.
            if not best_effort:
                raise

    def _get(self) -> Json | None:
        try:
            return self._api.call("GET", self._path)
        except ApiRefusal as error:
            if error.status == 404:
                return None
            raise

    def _evict(self, pod: Json) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        }
        try:
            self._api.call("POST", f"{path}/eviction", eviction)
        except ApiRefusal as error:
            # 429: a disruption budget does not allow it yet.
            if error.status not in (404, 409, 429):
                raise


def _is_of_daemon_set(pod: Json) -> bool:
    """Pods that `kubectl drain --ignore-daemonsets` ignores."""
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner["kind"] == "DaemonSet" for owner in owners)
