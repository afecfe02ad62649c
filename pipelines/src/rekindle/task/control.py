"""The task's HTTP port: probes, metrics and the coordinator's polls, in a separate thread.

Responds while Spark starts and while the engine is busy: it only uses the poll handler and the
status. Polls need the topology's token, if it has one; probes and metrics need none and contain no
secrets. `/livez` is about this process, never its inputs; `/readyz`: whether readers may connect.

Design: docs/design/task.md#environment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from rekindle.identity import Identity
from rekindle.protocol import MAX_POLL_BYTES, Incompatible, PollRequest, decode
from rekindle.task.core.polls import PollRefused
from rekindle.task.poll_handler import PollHandler
from rekindle.workers import Worker

_log = logging.getLogger(__name__)


class PortServer:
    """Binds in the constructor (raises OSError), then serves until `stop`, in its own thread."""

    def __init__(self, address: str, port: int, application: web.Application) -> None:
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        try:
            self._loop.run_until_complete(self._runner.setup())
            site = web.TCPSite(self._runner, address, port)
            self._loop.run_until_complete(site.start())
        except BaseException:
            self._loop.run_until_complete(self._runner.cleanup())
            self._loop.close()
            raise
        self.port: int = self._runner.addresses[0][1]
        self._worker = Worker("control", self._loop.run_forever).start()

    def stop(self) -> None:
        self._worker.stop()
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(2)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.join(2)
        if not self._loop.is_running():
            self._loop.close()


def probe(holds: Callable[[], bool]) -> Callable[[web.Request], asyncio.Future[web.Response]]:
    """A handler that answers 200 if it holds, and 503 otherwise."""

    async def answer(_: web.Request) -> web.Response:
        good = holds()
        return web.Response(status=200 if good else 503, text="ok\n" if good else "no\n")

    return answer  # type: ignore[return-value]


class ControlServer(PortServer):
    """`identity`: polls must have its token; if it has none, no token is required."""

    def __init__(
        self,
        address: str,
        port: int,
        polls: PollHandler,
        *,
        alive: Callable[[], bool],
        ready: Callable[[], bool],
        registry: CollectorRegistry,
        identity: Identity | None = None,
    ) -> None:
        self._polls = polls
        self._identity = identity or Identity()
        self._alive = alive
        self._ready = ready
        self._registry = registry
        super().__init__(address, port, self._application())

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_POLL_BYTES)
        application.add_routes(
            [
                web.get("/startupz", probe(lambda: True)),
                web.get("/livez", probe(self._alive)),
                web.get("/readyz", probe(self._ready)),
                web.get("/metrics", self._metrics),
                web.post("/v1/poll", self._poll),
            ]
        )
        return application

    async def _metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _poll(self, request: web.Request) -> web.Response:
        if not self._identity.accepts(request.headers.get("Authorization")):
            text = "poll refused: this port needs the topology's token (Authorization: Bearer)"
            return web.Response(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})
        try:
            answer = self._polls.poll(decode(PollRequest, await request.read()))
        except ValidationError as error:
            return web.Response(status=400, text=str(error))
        except Incompatible as error:
            return web.Response(status=426, text=f"poll refused: {error}")
        except PollRefused as error:
            return web.Response(status=error.status, text=str(error))
        return web.Response(text=answer.model_dump_json(), content_type="application/json")
