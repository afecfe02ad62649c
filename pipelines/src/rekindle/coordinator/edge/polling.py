"""Polls every task on its own, so that a frozen one delays no other.

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

from rekindle.coordinator.edge.settings import Settings
from rekindle.coordinator.model import Event, FenceRaised, PollAnswered, PollFailed
from rekindle.coordinator.tasks.membership import Task
from rekindle.protocol import CONTROL_PORT, Incompatible, PollRequest, PollResponse, decode
from rekindle.topology.model import Slot

_log = logging.getLogger(__name__)
_NEWER_COORDINATOR = 409
_REFUSED = frozenset({401, 421, 426})
"""Token, topology or protocol version: trying again does not cure it, so the status says it."""
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An HTTP status that is not 200, and the reason the task gave."""

    status: int
    text: str


class Pollers:
    """One loop for each slot that has a pod. `wish` gives the poll and the address to send it to,
    at the moment of sending; None where there is nobody."""

    def __init__(
        self,
        settings: Settings,
        wish: Callable[[Slot], tuple[PollRequest, str] | None],
        feed: Callable[[Event], None],
        observe: Callable[[float, bool], None],
    ) -> None:
        self._settings, self._wish, self._feed, self._observe = settings, wish, feed, observe
        self._headers = {"Content-Type": "application/json"}
        if (authorization := settings.identity.authorization) is not None:
            self._headers["Authorization"] = authorization
        self._session: aiohttp.ClientSession | None = None
        self._loops: dict[Slot, asyncio.Task[None]] = {}
        self._kicks: dict[Slot, asyncio.Event] = {}

    async def open(self) -> None:
        deadline = aiohttp.ClientTimeout(total=self._settings.poll_deadline_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(timeout=deadline, connector=connector)

    async def close(self) -> None:
        for loop in self._loops.values():
            loop.cancel()
        if self._session is not None:
            await self._session.close()

    def follow(self, tasks: Iterable[Task]) -> None:
        """Poll these tasks and no others."""
        slots = {t.slot for t in tasks if t.pod.runs}
        for slot in self._loops.keys() - slots:
            self._loops.pop(slot).cancel()
            del self._kicks[slot]
        for slot in slots - self._loops.keys():
            self._kicks[slot] = asyncio.Event()
            self._loops[slot] = asyncio.create_task(self._loop(slot, self._kicks[slot]))

    def kick(self, slot: Slot) -> None:
        """Poll this task without waiting for the interval."""
        if slot in self._kicks:
            self._kicks[slot].set()

    async def _loop(self, slot: Slot, kick: asyncio.Event) -> None:
        while True:
            kick.clear()
            wish = self._wish(slot)
            if wish is not None:
                began = time.monotonic()
                event = await self._poll(slot, *wish)
                self._observe(time.monotonic() - began, isinstance(event, PollAnswered))
                self._feed(event)
            try:
                await asyncio.wait_for(kick.wait(), self._settings.poll_interval_s)
            except TimeoutError:
                continue

    async def _poll(self, slot: Slot, poll: PollRequest, host: str) -> Event:
        incarnation = poll.task.incarnation
        try:
            answer = await self._call(poll, host)
        except Incompatible as error:
            said = f"the answer of {host} is refused: {error}"
            return PollFailed(slot, incarnation, said, refused=True)
        except (OSError, TimeoutError, aiohttp.ClientError, ValidationError) as error:
            return PollFailed(slot, incarnation, repr(error)[:_MAX_TEXT])
        if isinstance(answer, _Refusal):
            if answer.status == _NEWER_COORDINATOR:
                return FenceRaised(f"task {slot.key} refused fence {poll.fence}")
            said = f"HTTP {answer.status} from {host}: {answer.text}"
            return PollFailed(slot, incarnation, said, refused=answer.status in _REFUSED)
        if (reason := self._settings.identity.mismatch(answer.topology)) is not None:
            said = f"the answer of {host} is refused: {reason}"
            return PollFailed(slot, incarnation, said, refused=True)
        if answer.task != poll.task:
            return PollFailed(slot, incarnation, f"{answer.task} is at {host}")
        return PollAnswered(slot, incarnation, answer)

    async def _call(self, poll: PollRequest, host: str) -> PollResponse | _Refusal:
        assert self._session is not None
        where = f"[{host}]" if ":" in host else host
        async with self._session.post(
            f"http://{where}:{CONTROL_PORT}/v1/poll",
            data=poll.model_dump_json(),
            headers=self._headers,
        ) as response:
            if response.status != 200:
                text = (await response.content.read(_MAX_TEXT)).decode(errors="replace")
                return _Refusal(response.status, text)
            return decode(PollResponse, await response.read())
