"""The node's HTTPS endpoint, for `kubectl logs` through the API server.

Its certificate is signed by the cluster's CA; clients must have the API server's
certificate.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from rekindle_testing.embedded.process_node import logs
from rekindle_testing.embedded.process_node.attempts import Attempt
from rekindle_testing.embedded.process_node.container import Container
from rekindle_testing.embedded.process_node.pod_worker import PodWorker
from rekindle_testing.embedded.process_node.settings import NodeSettings

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NO_EXEC = (
    "a process node does not support exec, attach or port-forward: its containers are processes "
    "of this machine, reachable from it; see docs/process-nodes.md"
)


class KubeletServer:
    """Reads `workers`, which the agent keeps up to date."""

    def __init__(self, settings: NodeSettings, workers: Mapping[str, PodWorker]) -> None:
        self._settings = settings
        self._workers = workers

    async def start(self) -> None:
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/healthz", _healthz)
        app.router.add_get("/pods", self._pods)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        for verb in ("exec", "attach", "portForward", "run"):
            app.router.add_route("*", f"/{verb}/{{rest:.*}}", _refuse)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._settings.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._settings.serving_certificate, self._settings.serving_key)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(
            runner, self._settings.address, self._settings.kubelet_port, ssl_context=context
        )
        await site.start()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        # The CA also signs for nodes, which must not read each other's logs.
        certificate = (request.transport and request.transport.get_extra_info("peercert")) or {}
        names = [value for part in certificate.get("subject", ()) for _, value in part]
        if self._settings.apiserver_client_name not in names:
            return web.Response(
                status=403, text="only the API server may send requests to a node\n"
            )
        return await handler(request)

    async def _pods(self, _: web.Request) -> web.Response:
        items = [worker.pod for worker in self._workers.values() if not worker.removed]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "items": items})

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        query = logs.LogQuery.parse(request.query, time.time())
        container = self._find(request)
        attempt = _attempt(container, query.previous)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)

        def is_over() -> bool:
            return attempt is not container.attempt or not attempt.running

        async for piece in logs.read(attempt.log, query, is_over):
            await response.write(piece)
        await response.write_eof()
        return response

    def _find(self, request: web.Request) -> Container:
        namespace, name, container_name = (
            request.match_info[key] for key in ("namespace", "pod", "container")
        )
        for worker in self._workers.values():
            meta = worker.pod["metadata"]
            same = (meta["namespace"], meta["name"]) == (namespace, name)
            if same and not worker.removed and (found := worker.find(container_name)):
                return found
        text = f"no container {container_name} of pod {namespace}/{name} on this node\n"
        raise web.HTTPNotFound(text=text)


def _attempt(container: Container, previous: bool) -> Attempt:
    attempt = container.attempt
    if previous and attempt is not None:
        attempt = container.previous()
    if attempt is None:
        which = "previous terminated container" if previous else "container"
        raise web.HTTPBadRequest(text=f'{which} "{container.name}" does not exist\n')
    return attempt


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _refuse(_: web.Request) -> web.Response:
    # As a Status, since clients show its message and hide plain text.
    status = {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "reason": "MethodNotAllowed",
        "message": _NO_EXEC,
        "code": 405,
    }
    return web.json_response(status, status=405)
