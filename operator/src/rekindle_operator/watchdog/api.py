"""HTTP calls of the watchdog with the standard library: to the API server, and probes of kubelets
and pods."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 2.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WatchdogAccess:
    """How to reach the API server, and as whom."""

    url: str
    tls: ssl.SSLContext | None = None
    token: Path | None = None  # read for each call, since the kubelet replaces it


def find_access(env: Mapping[str, str]) -> WatchdogAccess:
    """From the pod's environment and ServiceAccount."""
    host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    tls = ssl.create_default_context(cafile=str(_SERVICE_ACCOUNT / "ca.crt"))
    return WatchdogAccess(f"https://{host}:{port}", tls, _SERVICE_ACCOUNT / "token")


class ApiServer:
    """Calls raise OSError or HTTPException if there is no response in time."""

    def __init__(self, access: WatchdogAccess) -> None:
        self._access = access
        self._connection: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, body: Json | None = None) -> tuple[int, Json]:
        """(HTTP status, JSON of the response)."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self._access.token is not None:
            headers["Authorization"] = f"Bearer {self._access.token.read_text().strip()}"
        connection = self._connection or self._connect()
        self._connection = None
        data = json.dumps(body) if body is not None else None
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read()
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        with contextlib.suppress(ValueError):
            return response.status, dict(json.loads(text))
        return response.status, {}

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._access.url)
        host, port = parts.hostname or "", parts.port
        if self._access.tls is None:
            return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=self._access.tls)


def kubelet_responds(host: str, port: int, within_s: float) -> bool:
    """Whether a TLS handshake works: the kernel accepts connections for a frozen process too, but
    it cannot do the handshake. The certificate is not verified, since nothing is sent."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), within_s) as plain, tls.wrap_socket(plain):
            return True
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, TimeoutError):
        return False
    except ssl.SSLError:
        return True  # the process has refused the handshake, so it runs
    except OSError:
        return False


def pod_responds(host: str, port: int, within_s: float) -> bool:
    """Whether it responds to /livez, with any status."""
    connection = http.client.HTTPConnection(host, port, timeout=within_s)
    try:
        connection.request("GET", "/livez")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
