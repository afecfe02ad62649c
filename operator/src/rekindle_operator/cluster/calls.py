"""Calls of the Kubernetes API with plain JSON, each with a timeout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from rekindle import yaml_json

_TIMEOUT_S = (3, 10)


def call(
    api: client.ApiClient,
    method: str,
    path: str,
    body: Any = None,
    *,
    content_type: str = "application/json",
    query: Iterable[tuple[str, str]] = (),
    none_for_status: int | tuple[int, ...] = (),
    timeout_s: tuple[float, float] = _TIMEOUT_S,
) -> dict[str, Any] | None:
    """The JSON of the response; None for the HTTP statuses in `none_for_status`. `timeout_s`: to
    connect, and to read. Raises ApiException, or HTTPError if there is no response."""
    if content_type.endswith("yaml"):
        body = yaml_json.dump(body)
    request = api.param_serialize(
        method,
        path,
        query_params=list(query),
        header_params={"Accept": "application/json", "Content-Type": content_type},
        body=body,
        auth_settings=["BearerToken"],
    )
    response = api.call_api(*request, _request_timeout=timeout_s)
    text = str(response.read().decode())  # type: ignore[no-untyped-call]
    if isinstance(none_for_status, int):
        none_for_status = (none_for_status,)
    if response.status in none_for_status:
        return None
    if not 200 <= response.status <= 299:
        raise ApiException(status=response.status, reason=response.reason, body=text)
    return dict(json.loads(text))
