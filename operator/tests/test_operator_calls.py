"""Calls of the API server: what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kubernetes import client

from rekindle_operator.cluster.calls import call


class _Response:
    status = 200

    def read(self) -> bytes:
        return b"{}"


class _Recording(client.ApiClient):
    def call_api(
        self, method: str, url: str, header_params: Any = None, body: Any = None, *_: Any, **__: Any
    ) -> Any:
        self.sent = header_params["Content-Type"], body
        return _Response()


@pytest.mark.parametrize("text", ["column 🔥", "'\x7f'", "Ωß日"])
def test_server_side_apply_sends_yaml(text: str) -> None:
    """The API server parses it as YAML, which has no surrogate pairs as JSON has."""
    api = _Recording()
    content = "application/apply-patch+yaml"
    call(api, "PATCH", "/status", {"message": text}, content_type=content)
    assert api.sent[0] == content
    assert yaml.safe_load(api.sent[1]) == {"message": text}
