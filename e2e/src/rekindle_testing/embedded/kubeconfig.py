"""Kubeconfig files, self-contained so that they can be handed to any process."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from rekindle_testing.embedded.pki import KeyPair


def write_kubeconfig(path: Path, server: str, ca_file: Path, client: KeyPair) -> Path:
    """Write a kubeconfig of one cluster and one user; readable by its owner only."""
    user = {
        "client-certificate-data": _data(client.certificate),
        "client-key-data": _data(client.key),
    }
    cluster = {"server": server, "certificate-authority-data": _data(ca_file)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "embedded", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "embedded", "context": {"cluster": "embedded", "user": "user"}}],
        "current-context": "embedded",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    # JSON is YAML, and needs no library.
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _data(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode("ascii")
