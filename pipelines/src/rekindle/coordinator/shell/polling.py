"""Polls each task in a separate loop, so that a frozen task does not delay others.

Design: docs/design/coordinator.md#suspicion.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from rekindle.coordinator.core.state_machine import Event
from rekindle.coordinator.shell.settings import Settings
from rekindle.coordinator.tasks.membership import Task
from rekindle.protocol import CONTROL_PORT, Incompatible, PollRequest, PollResponse, decode
from rekindle.topology.model import Slot

_log = logging.getLogger(__name__)
_NEWER_COORDINATOR = 409
_REFUSED = frozenset({401, 421, 426})
"""Token, topology or protocol version do not match: reported, because a retry does not help."""
_MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An HTTP status other than 200, and the task's reason."""

    status: int
    text: str


class Pollers:
    """One loop for each slot that has a pod. `next_poll` is called just before each poll, and
    returns the poll and the address to send it to; None if there is no task. `on_poll` gets the
    seconds that a poll took, and whether the task responded. `on_loop_end` is called for each loop
    that ends, so that an error is not lost."""

    def __init__(
        self,
        settings: Settings,
        next_poll: Callable[[Slot], tuple[PollRequest, str] | None],
        on_event: Callable[[Event], None],
        on_poll: Callable[[float, bool], None],
        on_loop_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._settings = settings
        self._next_poll = next_poll
        self._on_event = on_event
        self._on_poll = on_poll
        self._on_loop_end = on_loop_end
        self._headers = {"Content-Type": "application/json"}
        if (authorization := settings.identity.authorization) is not None:
            self._headers["Authorization"] = authorization
        self._session: aiohttp.ClientSession | None = None
        self._loops: dict[Slot, asyncio.Task[None]] = {}
        self._wakeups: dict[Slot, asyncio.Event] = {}

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def close(self) -> None:
        for loop in self._loops.values():
            loop.cancel()
        if self._session is not None:
            await self._session.close()

    def poll_only(self, tasks: Iterable[Task]) -> None:
        """Poll those of these tasks that may be running, and no others."""
        slots = {t.slot for t in tasks if t.pod.may_be_running}
        for slot in self._loops.keys() - slots:
            self._loops.pop(slot).cancel()
            del self._wakeups[slot]
        for slot in slots - self._loops.keys():
            self._wakeups[slot] = asyncio.Event()
            self._loops[slot] = asyncio.create_task(self._loop(slot, self._wakeups[slot]))
            self._loops[slot].add_done_callback(self._on_loop_end)

    def poll_now(self, slot: Slot) -> None:
        """Poll this task without waiting for the interval."""
        if slot in self._wakeups:
            self._wakeups[slot].set()

    async def _loop(self, slot: Slot, poll_now: asyncio.Event) -> None:
        while True:
            poll_now.clear()
            next_poll = self._next_poll(slot)
            if next_poll is not None:
                began = time.monotonic()
                event, answered = await self._poll(slot, *next_poll)
                self._on_poll(time.monotonic() - began, answered)
                self._on_event(event)
            try:
                await asyncio.wait_for(poll_now.wait(), self._settings.poll_interval_s)
            except TimeoutError:
                continue

    async def _poll(self, slot: Slot, poll: PollRequest, host: str) -> tuple[Event, bool]:
        """What happened, and whether the task responded."""
        incarnation = poll.task.incarnation

        def failed(message: str, *, refused: bool = False) -> tuple[Event, bool]:
            return lambda core, now: core.poll_failed(
                slot, incarnation, message, now, refused=refused
            ), False

        try:
            response = await self._call(poll, host)
        except Incompatible as error:
            message = f"the response of {host} is refused: {error}"
            return failed(message, refused=True)
        except (OSError, TimeoutError, aiohttp.ClientError, ValidationError) as error:
            return failed(repr(error)[:_MAX_TEXT_CHARS])
        if isinstance(response, _Refusal):
            if response.status == _NEWER_COORDINATOR:
                by = f"task {slot.key} refused fence {poll.fence}"
                return lambda core, now: core.fence_raised(by, now), False
            message = f"HTTP {response.status} from {host}: {response.text}"
            return failed(message, refused=response.status in _REFUSED)
        if (reason := self._settings.identity.mismatch(response.topology)) is not None:
            message = f"the response of {host} is refused: {reason}"
            return failed(message, refused=True)
        if response.task != poll.task:
            return failed(f"{response.task} is at {host}")
        return lambda core, now: core.poll_answered(slot, incarnation, response, now), True

    async def _call(self, poll: PollRequest, host: str) -> PollResponse | _Refusal:
        assert self._session is not None
        url_host = f"[{host}]" if ":" in host else host
        async with self._session.post(
            f"http://{url_host}:{CONTROL_PORT}/v1/poll",
            data=poll.model_dump_json(),
            headers=self._headers,
        ) as response:
            if response.status != 200:
                text = (await response.content.read(_MAX_TEXT_CHARS)).decode(errors="replace")
                return _Refusal(response.status, text)
            return decode(PollResponse, await response.read())
