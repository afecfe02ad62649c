"""The few calls of the Kubernetes API that a coordinator makes, over aiohttp.

Not the official client: that costs some 25 MB, and a coordinator reads pods and ConfigMaps, renews
one Lease and patches one status. Knows the API's conventions (resourceVersion, watch events,
Status objects), but not topologies.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from rekindle import yaml_json
from rekindle.backoff import BackoffPolicy
from rekindle.coordinator.shell.kube_access import Access
from rekindle.errors import RekindleError

Json = dict[str, Any]

_CALL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
# Watches are short, so that a dead connection is noticed soon: in a burst, when an API server may
# fail with its zone, new pods must not be missed.
_WATCH_S = 10
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_WATCH_S + 5.0)
_MAX_LINE_BYTES = 8 * 1024 * 1024


class ApiError(RekindleError):
    """The API server returned the HTTP error `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


CALL_ERRORS = (ApiError, OSError, TimeoutError, aiohttp.ClientError, ValueError)
"""Errors of calls while the API server is unreachable, starting or restarting."""

# With jitter, so that coordinators do not all retry at the same time.
API_BACKOFF = BackoffPolicy(first_s=0.3, longest_s=6.0, jitter=0.5)


class KubeApi:
    """Raises ApiError, or OSError/TimeoutError/aiohttp.ClientError without a response."""

    def __init__(self, access: Access) -> None:
        self._access = access
        connector = aiohttp.TCPConnector(ssl=access.tls if access.tls is not None else True)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_MAX_LINE_BYTES)

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: Json) -> Json:
        return await self._call("POST", path, body=body)

    async def replace(self, path: str, body: Json) -> Json:
        """PUT; a `metadata.resourceVersion` in the body makes it conditional (409)."""
        return await self._call("PUT", path, body=body)

    async def apply(self, path: str, body: Json, manager: str) -> Json:
        """Server-side apply, taking fields over from other managers."""
        return await self._call(
            "PATCH",
            path,
            query={"fieldManager": manager, "force": "true"},
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[tuple[str, Json]]:
        """(type, object) of each event, until the server ends the watch. Raises ApiError with
        status 410 when the resourceVersion is too old: list again."""
        full = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        async with self._session.get(
            self._access.url + path, params=full, headers=self._headers(), timeout=_WATCH_TIMEOUT
        ) as response:
            if response.status >= 400:
                raise ApiError(response.status, await _message(response))
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(int(status.get("code", 500)), str(status.get("message")))
                yield event["type"], event["object"]

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        headers = {**self._headers(), "Content-Type": content_type}
        # The API server parses an apply as YAML, which refuses some of JSON's escapes.
        dump = yaml_json.dump if content_type.endswith("yaml") else json.dumps
        data = dump(body) if body is not None else None
        async with self._session.request(
            method,
            self._access.url + path,
            params=query,
            data=data,
            headers=headers,
            timeout=_CALL_TIMEOUT,
        ) as response:
            if response.status >= 400:
                raise ApiError(response.status, await _message(response))
            document: Json = await response.json()
            return document

    def _headers(self) -> dict[str, str]:
        token = self._access.token.read()
        return {"Authorization": f"Bearer {token}"} if token else {}


async def _message(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        return str(json.loads(text).get("message", text))
    except (ValueError, AttributeError):
        return text[:500]
