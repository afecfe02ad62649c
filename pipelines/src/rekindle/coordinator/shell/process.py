"""The coordinator's process: feeds events into the state machine and performs its effects.

All in one event loop, so that the state machine is never called concurrently; the store has a
thread.

Design: docs/design/coordinator.md#structure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, assert_never

from rekindle.coordinator.core.state_machine import Coordinator, Event
from rekindle.coordinator.model import (
    ApplyStatus,
    CollectGarbage,
    Effect,
    Generation,
    Pod,
    PollNow,
    ReadNewestManifest,
    ReportRestorePoint,
    StepDown,
    WriteManifest,
)
from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.polling import Pollers
from rekindle.coordinator.shell.reporting import LeaseKeeper, StatusWriter, store_id_from_status
from rekindle.coordinator.shell.serving import Metrics, serve
from rekindle.coordinator.shell.settings import Settings
from rekindle.coordinator.shell.store import CheckpointStore
from rekindle.coordinator.shell.watching import GenerationReader, PodWatcher
from rekindle.errors import RekindleError
from rekindle.protocol import PollRequest
from rekindle.topology.model import Slot

FENCED = 3
"""Exit code of a coordinator that was replaced."""
_log = logging.getLogger(__name__)


class Process:
    def __init__(self, settings: Settings, api: KubeApi) -> None:
        self._settings = settings
        self._api = api
        self.core = Coordinator(
            settings.incarnation,
            wall_s=time.time() - time.monotonic(),  # when the monotonic clock was zero
            topology=settings.topology_uid,
            started_ms=time.time_ns() // 1_000_000,
        )
        self._metrics = Metrics(self.core)
        self._store = CheckpointStore(settings.topology_uid, settings.store_timeout_s)
        self._store_id_is_known = False
        self._status = StatusWriter(api, settings, self.feed)
        observe = self._metrics.observe_poll
        self._pollers = Pollers(settings, self._next_poll, self.feed, observe, self._done)
        self._ended = asyncio.Event()
        self._exit_code = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run until `stop`, or until another coordinator has taken over. Returns the exit code."""
        await self._pollers.open()
        server = await serve(self._settings.bind, self._metrics, lambda: self.core.ready)
        for work in (
            PodWatcher(self._api, self._settings, self._pods_listed).run(),
            GenerationReader(self._api, self._settings, self.feed, self._generation_seen).run(),
            self._lease_keeper().run(),
            self._status.run(),
            self._tick(),
        ):
            self._start(work)
        try:
            await self._ended.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._pollers.close()
            await server.cleanup()
            await self._api.close()
            self._store.close()
        return self._exit_code

    def _lease_keeper(self) -> LeaseKeeper:
        return LeaseKeeper(
            self._api,
            self._settings,
            self.feed,
            valid_report_number=lambda: self._status.valid_report_number,
            suspecting=lambda: any(task.suspected for task in self.core.membership),
            knows_generation=lambda: self.core.generation is not None,
        )

    def stop(self) -> None:
        _log.info("stopping: signal received")
        self._ended.set()

    def feed(self, event: Event) -> None:
        if not self._ended.is_set():
            for effect in event(self.core, time.monotonic()):
                self._perform(effect)

    def _generation_seen(self, generation: Generation) -> None:
        self._store.use(generation.topology.spec.checkpoint.store)
        _log.info("generation %d", generation.number)
        self.feed(lambda core, now: core.generation_seen(generation, now))

    def _pods_listed(self, pods: Sequence[Pod]) -> None:
        self.feed(lambda core, now: core.pods_listed(pods, now))
        self._pollers.poll_only(self.core.membership)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ReadNewestManifest():
                self._start(self._read())
            case WriteManifest():
                self._start(self._write(effect))
            case CollectGarbage():
                self._start(self._collect(effect))
            case ApplyStatus(report=report):
                self._status.offer(report)
            case PollNow(slot=slot):
                self._pollers.poll_now(slot)
            case ReportRestorePoint(slot, incarnation, point):
                lender = point.lender
                origin = "the checkpoint" if lender is None else f"replica {lender.replica}"
                what = f"{slot.key}, incarnation {incarnation}: restores epoch {point.epoch}"
                _log.info("%s of %s", what, origin)
            case StepDown(reason=reason):
                _log.error("fenced: %s", reason)
                self._exit_code = FENCED
                self._ended.set()
            case _:
                assert_never(effect)

    async def _tick(self) -> None:
        while True:
            self.feed(Coordinator.woken)
            await asyncio.sleep(self._settings.tick_s)

    async def _read(self) -> None:
        try:
            if not self._store_id_is_known:
                self._store.require_store_id(await store_id_from_status(self._api, self._settings))
                self._store_id_is_known = True
            manifest, store = await self._store.newest(), self._store.id
            self.feed(lambda core, now: core.manifest_read(manifest, now, store))
        except RekindleError as error:
            self._store_failed(error)

    async def _write(self, effect: WriteManifest) -> None:
        try:
            refused = await self._store.not_committable(list(effect.new_entries))
            if refused:
                name, why = next(iter(refused.items()))
                message = f"{name}: {why}"
                self.feed(lambda core, now: core.entries_refused(tuple(refused), message, now))
                return
            written = await self._store.write(effect)
        except RekindleError as error:
            self._store_failed(error)
            return
        if written is None:
            self.feed(Coordinator.manifest_race_lost)
        else:
            _log.info("manifest %d: epoch %d", written.seq, written.epoch)
            self.feed(lambda core, now: core.manifest_written(written, now))

    async def _collect(self, effect: CollectGarbage) -> None:
        problem = None
        try:
            await self._store.collect_garbage(effect)
        except RekindleError as error:
            problem = str(error)
        unrestorable = self._store.unrestorable
        self.feed(lambda core, now: core.garbage_collected(problem, unrestorable, now))

    def _store_failed(self, error: RekindleError) -> None:
        _log.warning("%s", error)
        self.feed(lambda core, now: core.store_failed(str(error), now))

    def _next_poll(self, slot: Slot) -> tuple[PollRequest, str] | None:
        poll, task = self.core.poll_for(slot), self.core.membership.get(slot)
        if poll is None or task is None or task.pod.address is None:
            return None
        return poll, task.pod.address

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug: a new process rebuilds its state within seconds.
            _log.critical("unexpected error: the process ends", exc_info=error)
            self._exit_code = 1
            self._ended.set()
