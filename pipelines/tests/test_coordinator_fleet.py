"""Fake tasks behind real sockets: they speak the poll protocol, move with the clock, can freeze.

Not tests: the coordinator's process tests, here and in e2e, import it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from aiohttp import web
from coordinator_parts import FakeTask

from rekindle.checkpoints import StateStore, Store
from rekindle.engine.model import State
from rekindle.identity import Identity
from rekindle.protocol import CONTROL_PORT, CheckpointDone, PollRequest
from rekindle.topology.model import Slot, Topology

T = TypeVar("T")


class Fleet:
    """A fake task for each slot, on an address of its own below 127.`net`. They take every epoch
    that the clock has released, and save a real (empty) entry at checkpoint epochs."""

    def __init__(
        self, topology: Topology, net: str, store: Path, uid: str, token: str | None = None
    ) -> None:
        self.topology = topology
        self._identity = Identity(uid, token)
        self.tasks: dict[Slot, FakeTask] = {}
        self.addresses: dict[Slot, str] = {}
        self.heard_at: dict[Slot, float] = {}
        self._net = net
        self._store = StateStore(Store(f"file://{store}"), uid)
        self._began = time.monotonic()
        self._interval_s = topology.spec.epoch_interval / 1e6
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runners: dict[Slot, web.AppRunner] = {}
        self._hosts = itertools.count(1)

    def __enter__(self) -> Fleet:
        self._thread.start()
        self._working = asyncio.run_coroutine_threadsafe(self._work(), self._loop)
        self.start(self.topology.slots())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for slot in list(self._runners):
            self.stop(slot)
        self._working.cancel()
        self._await(asyncio.sleep(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def head(self) -> int:
        return int((time.monotonic() - self._began) / self._interval_s) - 1

    def start(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            before = self.tasks.get(slot)
            self.tasks[slot] = FakeTask(slot, before.incarnation + 1 if before else 1)
            self.addresses[slot] = f"127.{self._net}.{next(self._hosts)}"
            self._await(self._serve(slot))

    def stop(self, slot: Slot) -> None:
        runner = self._runners.pop(slot)
        self._await(runner.cleanup())

    def polls(self, slot: Slot) -> int:
        return len(self.tasks[slot].polls)

    async def _serve(self, slot: Slot) -> None:
        async def poll(request: web.Request) -> web.Response:
            task = self.tasks[slot]
            while task.frozen:
                await asyncio.sleep(0.02)
            message = PollRequest.model_validate_json(await request.read())
            if message.task.incarnation != task.incarnation:
                return web.Response(status=410)
            if not self._identity.accepts(request.headers.get("Authorization")):
                return web.Response(status=401, text="no token")
            response = task.poll(message)
            if response is None:
                return web.json_response({"fence": task.fence}, status=409)
            self.heard_at[slot] = time.monotonic()
            response = response.model_copy(update={"topology": self._identity.topology})
            return web.Response(text=response.model_dump_json(), content_type="application/json")

        app = web.Application()
        app.router.add_post("/v1/poll", poll)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, self.addresses[slot], CONTROL_PORT).start()
        self._runners[slot] = runner

    async def _work(self) -> None:
        while True:
            for task in self.tasks.values():
                if not task.frozen:
                    self._advance(task)
            await asyncio.sleep(0.05)

    def _advance(self, task: FakeTask) -> None:
        if task.phase == "Restoring":
            task.phase = "CatchingUp"
        elif task.phase in ("CatchingUp", "Live"):
            every = self.topology.spec.checkpoint_every
            while task.position < self.head:
                task.take()
                if (task.position + 1) % every == 0 and task.last_poll and task.last_poll.saver:
                    task.saved[task.position] = self._save(task)
            task.phase = "Live"

    def _save(self, task: FakeTask) -> CheckpointDone:
        slot, epoch = task.slot, task.position
        ref = self._store.save(slot.segment, slot.partition, epoch, 0, (), State({}), None)
        assert ref.object is not None
        return CheckpointDone(epoch=epoch, object=ref.object, digest=ref.digest, bytes=ref.bytes)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
