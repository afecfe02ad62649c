"""Lends this task's state to partners, and reads what a partner lends.

A partner is a store from which a state is restored like from the checkpoint store. `LenderStore` is
used by the threads that fetch, `StateLender` by the event loop of the stream server, which encodes
objects in a thread, one after another.

Design: docs/design/lent-state.md.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from rekindle.checkpoints.lent import LentState
from rekindle.checkpoints.store import UnreadableObject
from rekindle.errors import ObjectMissing, StoreError
from rekindle.identity import Identity
from rekindle.protocol import Endpoint
from rekindle.streams.io_thread import CallThread
from rekindle.streams.wire import LENT_PATH, MAX_ERROR_BYTES, MessageIdentity, lent_object
from rekindle.task.process import TaskProcess
from rekindle.task.state import TaskState

OBJECTS_AT_ONCE = 4
"""Objects that are in memory while they are sent, to all partners."""
CALL_S = 10.0
"""How long a lender may send nothing."""
SILENT_S = 15.0
"""A lender that has not responded for so long is lost."""
_BUSY = 500  # from this status on, another attempt may succeed


class StateLender:
    """Reads for partners what the core lends."""

    def __init__(
        self, process: TaskProcess, describe: Callable[[str, TaskState], LentState]
    ) -> None:
        """`describe`: a state whose entry has this name."""
        self._process = process
        self._describe = describe
        self._described: LentState | None = None  # the one that was read last
        self._sending = asyncio.Semaphore(OBJECTS_AT_ONCE)
        self._thread = CallThread("state-lender")

    def tick(self) -> None:
        """Forget what is not lent any more."""
        with self._process.lock:
            if self._process.core.lending.newest is None:
                self._described = None

    def stop(self, timeout_s: float) -> None:
        self._thread.stop(timeout_s)

    @asynccontextmanager
    async def read(self, name: str) -> AsyncIterator[bytes]:
        async with self._sending:
            yield await self._thread.run(partial(self._read_now, name))

    def _read_now(self, name: str) -> bytes:
        entry_name = "/".join(name.split("/")[:3])
        with self._process.lock:
            state = self._process.core.lending.read(entry_name, time.monotonic())
        if state is None:
            raise ObjectMissing(f"{name} is not lent any more")
        described = self._described
        if described is None or described.name != entry_name:
            described = self._described = self._describe(entry_name, state)
        return described.read(name)


class LenderStore:
    """What one partner lends, as a store. Safe for many threads."""

    def __init__(self, lender: Endpoint, identity: Identity) -> None:
        self.url = f"http://{lender.address}"
        self._address = lender.address
        self._identity = identity
        self._incarnation = lender.incarnation
        self._heard_at = time.monotonic()

    def put(self, name: str, data: bytes) -> bool:
        raise StoreError(f"{self.url}: nothing is saved at a partner")

    def read(self, name: str) -> bytes:
        return self.get(name)

    def get(self, name: str) -> bytes:
        """`name`: below the topology's UID. Raises ObjectMissing also if the lender is lost."""
        try:
            status, content = self._call(name.partition("/")[2])
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() - self._heard_at > SILENT_S:
                raise ObjectMissing(f"{self.url} does not lend {name} any more: {error}") from error
            raise StoreError(f"{self.url}: {error or repr(error)}") from error
        self._heard_at = time.monotonic()
        if status >= _BUSY:
            raise StoreError(f"{self.url}: {_message(content)}")
        if status != http.client.OK:
            raise ObjectMissing(f"{self.url}: {_message(content)}")
        try:
            return lent_object(content)
        except ValueError as error:
            raise UnreadableObject(f"{self.url}: {name}: {error}") from error

    def _call(self, name: str) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if (sent := self._identity.authorization) is not None:
            headers["Authorization"] = sent
        request = MessageIdentity.of(self._identity, self._incarnation).message() | {"name": name}
        connection = http.client.HTTPConnection(self._address, timeout=CALL_S)
        try:
            connection.request("POST", LENT_PATH, json.dumps(request), headers)
            response = connection.getresponse()
            whole = response.status == http.client.OK
            return response.status, response.read(None if whole else MAX_ERROR_BYTES)
        finally:
            connection.close()


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content[:300].decode(errors="replace")
