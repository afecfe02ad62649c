"""How to reach the API server: from inside a pod, or by a kubeconfig.

The token of a service account is re-read from its file, because the kubelet rotates it.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import RekindleError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S = 10.0


class AccessError(RekindleError):
    """Neither a service account nor a kubeconfig; says what is missing."""


@dataclass(slots=True)
class Token:
    """A bearer token for the API server, in a file (or fixed)."""

    file: Path | None = None
    value: str | None = None
    _read_at: float = field(default=float("-inf"))

    def read(self) -> str | None:
        """The token; its file is read again after ten seconds."""
        if self.file is not None and time.monotonic() - self._read_at > _TOKEN_AGE_S:
            self.value = self.file.read_text().strip()
            self._read_at = time.monotonic()
        return self.value


@dataclass(slots=True)
class Access:
    url: str
    tls: ssl.SSLContext | None
    token: Token


def find_access(environment: Mapping[str, str]) -> Access:
    """The pod's service account, or KUBECONFIG if that is set."""
    if environment.get("KUBECONFIG"):
        return _from_kubeconfig(Path(environment["KUBECONFIG"]))
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (SERVICE_ACCOUNT / "token").exists():
        raise AccessError(
            f"no API server: neither KUBECONFIG, nor KUBERNETES_SERVICE_HOST with {SERVICE_ACCOUNT}"
        )
    tls = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
    host = f"[{host}]" if ":" in host else host
    return Access(f"https://{host}:{port}", tls, Token(file=SERVICE_ACCOUNT / "token"))


def _from_kubeconfig(path: Path) -> Access:
    document = yaml.safe_load(path.read_text())
    contexts = _by_name(document, "contexts", "context")
    context = contexts[document["current-context"]]
    cluster = _by_name(document, "clusters", "cluster")[context["cluster"]]
    user = _by_name(document, "users", "user").get(context.get("user"), {})
    url = str(cluster["server"]).rstrip("/")
    token = Token(
        file=Path(user["tokenFile"]) if "tokenFile" in user else None, value=user.get("token")
    )
    return Access(url, _tls(cluster, user) if url.startswith("https") else None, token)


def _by_name(document: Mapping[str, Any], plural: str, singular: str) -> dict[str, Any]:
    return {item["name"]: item[singular] for item in document.get(plural) or []}


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    ca = _pem(cluster, "certificate-authority")
    tls = ssl.create_default_context(cadata=ca.decode() if ca else None)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    if certificate and key:
        # The ssl module loads a client's certificate from files only.
        with tempfile.NamedTemporaryFile(suffix=".pem") as pair:
            pair.write(certificate + b"\n" + key)
            pair.flush()
            tls.load_cert_chain(pair.name)
    return tls


def _pem(section: Mapping[str, Any], name: str) -> bytes | None:
    if f"{name}-data" in section:
        return base64.b64decode(section[f"{name}-data"])
    return Path(section[name]).read_bytes() if name in section else None
