"""The I/O around a newcomer: sends requests to the donor, stores chunks on the disk, installs them.

Chunks are stored in an unlinked file, as runs of the state are: a process that is killed leaves
nothing behind, and the file does not count for the volume's size limit, by which pods are evicted.

Orders come from the supervisor's thread, answers from an event loop, results of the disk from the
disk's thread; each steps the core, under a lock. The last two threads start with the first order.

Design: docs/design/state-movement.md#newcomer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from rekindle.errors import RekindleError
from rekindle.exchange.state_mover.messages import (
    ChunkRequest,
    Hold,
    MessageToDonor,
    NewcomerReport,
    OfferRequest,
    Refusal,
    RefusalReason,
    Replica,
    Session,
)
from rekindle.exchange.state_mover.newcomer import (
    ChunkStored,
    DiscardState,
    InstallState,
    MessageReceived,
    NewcomerCoreEvent,
    NewcomerEffect,
    NewcomerLimits,
    SendToDonor,
    StartFrom,
    StateInstalled,
    StoreChunk,
    StoringFailed,
    TimePassed,
)
from rekindle.identity import Identity
from rekindle.protocol import PollRequest
from rekindle.streams.io_thread import CallThread, IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.movement_client import DonorClient
from rekindle.streams.wire import StreamRefused, StreamUnavailable
from rekindle.task.core.movement import MovementPart
from rekindle.task.earlier_boots import EarlierBoots
from rekindle.task.moving.pieces import Moved, require_format

_TICK_S = 0.25
_log = logging.getLogger(__name__)

_Key = tuple[Session, str, int]


@dataclass(frozen=True, slots=True)
class Installed:
    """State and log of a partner, on this task's disk. `earlier`: results of this task's earlier
    boots."""

    moved: Moved
    log: OutputLog
    earlier: EarlierBoots


class StateNewcomer:
    """The state movements to one boot of a task. `installed`: the state and log from which the task
    may start; None until then."""

    def __init__(
        self,
        part: MovementPart,
        identity: Identity,
        directory: Path,
        install: Callable[[Path], Installed],
        limits: NewcomerLimits | None = None,
    ) -> None:
        """`part`: the core, which decides. `directory`: for chunks. `install` is
        called in the thread of the disk; raises RekindleError, OSError."""
        self.installed: Installed | None = None
        limits = limits or NewcomerLimits()
        self._part = part
        self._directory = directory
        self._install = install
        self._lock = threading.RLock()
        self._io: IoThread | None = None
        self._client = DonorClient(identity, limits.chunk_bytes, limits.chunks_at_once + 2)
        self._disk = CallThread("state-disk")
        self._files: dict[Session, IO[bytes]] = {}  # used in that thread
        self._asking: set[_Key] = set()
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the supervisor ----------------------------------------------------------------------------

    def apply_poll(self, poll: PollRequest, log_base: int | None) -> PollRequest:
        """Apply a poll with a desired state. Returns the poll for the supervisor: without its
        restore point while a session may still be used."""
        with self._lock:
            self._perform(self._part.apply_poll(poll, log_base, time.monotonic()))
            return self._part.without_early_restore(poll)

    def floor(self, floor: int) -> int:
        """The epoch through which the task's log may be truncated: `floor`, or less for its
        holds."""
        with self._lock:
            return self._part.floor(floor)

    def report(self) -> tuple[NewcomerReport | None, tuple[Hold, ...]]:
        """Its report as a newcomer, None once it has state; its holds for its consumers'
        newcomers."""
        with self._lock:
            part = self._part
            return None if part.has_state else part.newcomer_report(), part.holds()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End all requests: the task has started, or ends."""
        with self._lock:
            self._stopped = True
            io, self._io = self._io, None
        if io is None:
            return
        if io.alive:
            closing = asyncio.run_coroutine_threadsafe(self._client.close(), io.loop)
            with contextlib.suppress(TimeoutError):
                closing.result(timeout_s)
        io.stop(timeout_s)
        self._disk.stop(timeout_s)
        if not self._disk.alive:  # otherwise the call in progress does it
            self._discard_all()

    # -- the core ----------------------------------------------------------------------------------

    def _step(self, event: NewcomerCoreEvent) -> None:
        with self._lock:
            self._perform(self._part.step(event, time.monotonic()))

    def _perform(self, effects: list[NewcomerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToDonor(donor, message):
                    self._start(self._ask, donor, self._part.addresses.get(donor, ""), message)
                case StoreChunk():
                    self._start(self._store, effect)
                case InstallState(session, _):
                    self._start(self._install_state, session)
                case DiscardState(session):
                    _log.info("%s: the chunks that have arrived are discarded", session)
                    self._start(self._discard, session)
                case StartFrom(session, epoch, base):
                    _log.info("%s: starts after epoch %d, log from %d", session, epoch, base)

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Start a coroutine in the event loop, in the order of calls."""
        if self._stopped:
            return
        if self._io is None:
            self._io = IoThread("state-newcomer", self._died)
            self._io.start()
            self._io.call(self._create, self._tick)
        self._io.call(self._create, work, *arguments)

    def _create(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(work(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _died(self, reason: str) -> None:
        """The coordinator will see no progress, and give the session up."""
        _log.error("%s; no state can be moved to this task any more", reason)

    # -- in the event loop -------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._step(TimePassed())

    async def _ask(self, donor: Replica, address: str, message: MessageToDonor) -> None:
        key = _key_of(message)
        if key in self._asking:
            return  # the request is in progress
        self._asking.add(key)
        try:
            answer = await self._client.ask(address, donor.incarnation, message)
        except StreamRefused as error:
            answer = Refusal(message.session, RefusalReason.WRONG_RECIPIENT, str(error))
        except StreamUnavailable as error:
            _log.info("%s: %s", message.session, error)
            return  # the core repeats the request
        finally:
            self._asking.discard(key)
        if answer is not None:
            self._step(MessageReceived(answer))

    async def _store(self, chunk: StoreChunk) -> None:
        try:
            await self._disk.run(partial(self._store_now, chunk))
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception("%s: chunk %d cannot be stored", chunk.session, chunk.number)
            reason = (isinstance(error, OSError) and error.strerror) or str(error) or repr(error)
            what = f"chunk {chunk.number} cannot be stored in {self._directory}: {reason}"
            self._step(StoringFailed(chunk.session, what))
        else:
            self._step(ChunkStored(chunk.session, chunk.number))

    async def _install_state(self, session: Session) -> None:
        try:
            installed = await self._disk.run(partial(self._install_now, session))
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception("%s: state and log cannot be installed", session)
            self._step(StoringFailed(session, str(error) or repr(error)))
            return
        with self._lock:
            event = StateInstalled(session, installed.moved.digest)
            effects = self._part.step(event, time.monotonic())
            starts = any(isinstance(effect, StartFrom) for effect in effects)
            if starts:  # from here on the supervisor may take it
                self.installed = installed
            self._perform(effects)
        if not starts:
            installed.log.close()

    async def _discard(self, session: Session) -> None:
        await self._disk.run(partial(self._discard_now, session))

    # -- in the thread of the disk -----------------------------------------------------------------

    def _store_now(self, chunk: StoreChunk) -> None:
        if not chunk.number:
            require_format(chunk.data)  # now, rather than after the whole transfer
            self._discard_now(chunk.session)
            self._directory.mkdir(parents=True, exist_ok=True)
            self._files[chunk.session] = _unnamed_file(self._directory)
        file = self._files[chunk.session]
        free, stored = shutil.disk_usage(self._directory).free, file.tell()
        if free < stored + len(chunk.data):
            raise OSError(
                f"{free:,} bytes are free, and the {stored:,} bytes that have arrived have to be "
                "written once more when they are installed"
            )
        file.write(chunk.data)
        file.flush()
        if self._stopped:
            self._discard_all()

    def _install_now(self, session: Session) -> Installed:
        """The file is closed afterwards: parts of it that are still used are mapped in memory."""
        try:
            installed = self._install(Path(f"/dev/fd/{self._files[session].fileno()}"))
        finally:
            self._discard_now(session)
        if self._stopped:  # the supervisor will not take it
            installed.log.close()
        return installed

    def _discard_all(self) -> None:
        for session in [*self._files]:
            self._discard_now(session)

    def _discard_now(self, session: Session) -> None:
        if (file := self._files.pop(session, None)) is not None:
            file.close()


def _unnamed_file(directory: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=directory)


def _key_of(message: MessageToDonor) -> _Key:
    match message:
        case OfferRequest(session):
            return session, "offer", 0
        case ChunkRequest(session, _, _, number):
            return session, "chunk", number
        case _:
            return message.session, "release", 0
