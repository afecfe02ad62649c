"""JSON over HTTPS to the API server: only what a node needs.

Not the kubernetes client, which needs 60 MB in each agent.  Knows verbs, errors and
watches; the objects are plain JSON.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.process_node.fields import Json

_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"

# A network partition drops packets without errors: with keepalive, a watch detects a
# dead connection.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 5000),
)
_WATCH_TIMEOUT_S = 240


class NodeApiError(EmbeddedError):
    """The API server refused; `status` is the HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Unreachable(EmbeddedError):
    """No response from the API server in time."""


class ApiClient:
    """One identity at one API server."""

    def __init__(self, kubeconfig: Path, timeout_s: float = 4.0) -> None:
        document = json.loads(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        self.url: str = cluster["server"]
        context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        _load_client(context, document["users"][0]["user"], kubeconfig)
        connector = aiohttp.TCPConnector(ssl=context, limit=0, socket_factory=_socket)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session = aiohttp.ClientSession(
            connector=connector, headers={"Accept": "application/json"}
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, **query: str) -> Json:
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: Json) -> Json:
        return await self._call("POST", path, body)

    async def replace(self, path: str, body: Json) -> Json:
        return await self._call("PUT", path, body)

    async def merge_patch(self, path: str, body: Json) -> Json:
        return await self._call("PATCH", path, body, content_type=_MERGE)

    async def strategic_merge_patch(self, path: str, body: Json) -> Json:
        """Lists with a merge key (conditions) keep the entries of others."""
        return await self._call("PATCH", path, body, content_type=_STRATEGIC)

    async def delete(self, path: str, body: Json) -> Json:
        return await self._call("DELETE", path, body)

    async def watch(self, path: str, resource_version: str, **query: str) -> AsyncIterator[Json]:
        """Changes after `resource_version`, until the server or the network ends it."""
        query |= {
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_TIMEOUT_S),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=3.0, sock_read=_WATCH_TIMEOUT_S + 10
        )
        try:
            async with self._session.get(
                self.url + path, params=query, timeout=timeout
            ) as response:
                await _check(response)
                # Not `readline`, which refuses lines above a limit that pods can pass.
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        event: Json = json.loads(line)
                        if event["type"] == "ERROR":
                            status = event["object"]
                            raise NodeApiError(status.get("code", 500), status.get("message", ""))
                        yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"watch {path}: {error!r}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        try:
            async with self._session.request(
                method,
                self.url + path,
                params=query,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": content_type},
                timeout=self._timeout,
            ) as response:
                await _check(response)
                content: Json = json.loads(await response.read())
                return content
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        text = await response.text()
        try:
            message = str(json.loads(text).get("message", text))
        except ValueError:
            message = text
        raise NodeApiError(response.status, message)


def _load_client(context: ssl.SSLContext, user: Json, kubeconfig: Path) -> None:
    # The ssl module reads certificates from files only.
    certificate, key = kubeconfig.with_suffix(".crt"), kubeconfig.with_suffix(".key")
    fields = ("client-certificate-data", "client-key-data")
    for path, field in zip((certificate, key), fields, strict=True):
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(user[field]))
    context.load_cert_chain(certificate, key)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    created = socket.socket(family, kind, protocol)
    created.setblocking(False)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        created.setsockopt(socket.IPPROTO_TCP, option, value)
    return created
