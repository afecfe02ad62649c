"""The I/O around `DonorCore`: keeps (pins) state and log for a session, reads chunks, answers
newcomers.

The core is stepped in the event loop of the stream server, where requests arrive; state and log are
read in another thread. The engine's loop is not involved: its newest state is one reference. The
memory of answers is bounded, for all newcomers together.

Design: docs/design/state-movement.md#donor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rekindle.errors import RekindleError
from rekindle.exchange.state_mover.chunks import Slice
from rekindle.exchange.state_mover.donor import (
    ChunkRead,
    ChunkUnreadable,
    DonorCore,
    DonorCoreEvent,
    DonorLimits,
    DonorStopping,
    LeaseChecked,
    MessageReceived,
    PinFailed,
    PinProgressed,
    PinSnapshot,
    ReadChunk,
    Reply,
    SessionsReleased,
    SnapshotPinned,
    StateReached,
    UnpinSnapshot,
)
from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    MessageToDonor,
    MessageToNewcomer,
    Offer,
    OfferRequest,
    Preparing,
    Refusal,
    RefusalReason,
    Replica,
    Session,
)
from rekindle.streams.io_thread import CallThread
from rekindle.streams.log import LogPin, OutputLog
from rekindle.streams.server import StreamServer
from rekindle.task.core.snapshots import SNAPSHOT_BYTES, Snapshot
from rekindle.task.moving.pieces import NotMovable, Pieces
from rekindle.task.state import TaskState

ANSWER_S = 10.0
"""How long a request waits for the donor's answer; then the newcomer repeats it."""
PROGRESS_S = 0.5
"""Interval in which the number of runs that were read for an offer is updated."""
_log = logging.getLogger(__name__)

_Key = tuple[Session, int | None]
"""The request that a reply answers: the number of a chunk, or None for an offer."""


class SnapshotKeeper(Protocol):
    """Keeps named snapshots: the saver of the task."""

    def pin(self, state: TaskState) -> Snapshot:
        """Raises SnapshotsFull."""
        ...

    def unpin(self, snapshot: Snapshot) -> None: ...

    def kept_bytes(self, snapshot: Snapshot, newest: TaskState) -> int:
        """Memory that it keeps beyond the newest state."""
        ...


@dataclass(frozen=True, slots=True)
class _Pinned:
    """What a session reads: the state, the log, and both as pieces (`task.moving.pieces`)."""

    snapshot: Snapshot
    log: LogPin
    pieces: Pieces


class StateDonor:
    """All sessions for which this boot of a task is the donor."""

    def __init__(
        self,
        replica: Replica,
        boot: str,
        state: Callable[[], TaskState],
        log: OutputLog,
        snapshots: SnapshotKeeper,
        server: StreamServer,
        limits: DonorLimits | None = None,
    ) -> None:
        """`state`: the newest one; may be called by any thread."""
        self.sessions: tuple[Session, ...] = ()
        """For poll responses."""
        limits = limits or DonorLimits()
        self._state = state
        self._log = log
        self._snapshots = snapshots
        self._server = server
        self._core = DonorCore(replica, boot, state().epoch, limits)
        self._thread = CallThread("state-donor")
        self._pinned: dict[Session, _Pinned] = {}
        self._waiting: dict[_Key, list[asyncio.Future[MessageToNewcomer]]] = {}
        self._reading: set[_Key] = set()
        self._chunk_answers = 0  # that are being sent, or wait for their chunk
        # So many are read at a time, and as many may be sent meanwhile.
        self._max_chunk_answers = 2 * limits.sessions * limits.chunks_at_once
        self._tasks: set[asyncio.Task[None]] = set()
        server.serve_state(self.answer)

    def tick(self) -> None:
        """Called often, by the supervisor; does nothing without a session."""
        if self.sessions:
            self._server.call(self._step, StateReached(self._state().epoch))
            self._server.call(self._step, LeaseChecked())

    def release(self, sessions: Sequence[Session]) -> None:
        """The coordinator has released these sessions."""
        if sessions:
            self._server.call(self._step, SessionsReleased(sessions))

    def stop(self, timeout_s: float) -> None:
        self._server.call(self._step, DonorStopping())
        self._thread.stop(timeout_s)

    # -- in the server's event loop ----------------------------------------------------------------

    @asynccontextmanager
    async def answer(self, message: MessageToDonor) -> AsyncIterator[MessageToNewcomer | None]:
        if not isinstance(message, ChunkRequest):
            yield await self._answer(message)
            return
        if self._chunk_answers >= self._max_chunk_answers:
            yield Refusal(message.session, RefusalReason.BUSY)
            return
        self._chunk_answers += 1
        try:
            yield await self._answer(message)
        finally:
            self._chunk_answers -= 1

    async def _answer(self, message: MessageToDonor) -> MessageToNewcomer | None:
        key = _key_of(message)
        waiting: asyncio.Future[MessageToNewcomer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiting)
        try:
            self._step(MessageReceived(message))
            reply_follows = isinstance(message, OfferRequest) or key in self._reading
            if not reply_follows and not waiting.done():
                return None
            async with asyncio.timeout(ANSWER_S):
                return await waiting
        except TimeoutError:
            return None
        finally:
            others = self._waiting[key]
            others.remove(waiting)
            if not others:
                del self._waiting[key]

    def _step(self, event: DonorCoreEvent) -> None:
        before = set(self.sessions)
        effects = self._core.step(event, time.monotonic())
        self.sessions = self._core.sessions
        for session in before.symmetric_difference(self.sessions):
            what = "begins" if session in self.sessions else "has ended here"
            _log.info("%s %s", session, what)
        for effect in effects:
            match effect:
                case PinSnapshot(session):
                    self._start(self._pin(session))
                case UnpinSnapshot(session):
                    if (pinned := self._pinned.pop(session, None)) is not None:
                        self._start(self._thread.run(partial(self._unpin_now, pinned)))
                case ReadChunk(session, number, slices):
                    self._reading.add((session, number))
                    self._start(self._read(session, number, slices))
                case Reply(message):
                    self._reply(message)

    def _reply(self, message: MessageToNewcomer) -> None:
        """Answer all requests for this message; a refusal answers all requests of the session."""
        match message:
            case Preparing(session) | Offer(session):
                keys: list[_Key] = [(session, None)]
            case Chunk(session, _, number):
                keys = [(session, number)]
            case Refusal(session):
                keys = [key for key in self._waiting if key[0] == session]
        for key in keys:
            for waiting in self._waiting.get(key, ()):
                if not waiting.done():
                    waiting.set_result(message)

    async def _pin(self, session: Session) -> None:
        try:
            pinned = await self._thread.run(partial(self._pin_now, session))
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception("%s: state and log cannot be pinned", session)
            self._step(PinFailed(session, str(error)))
            return
        self._pinned[session] = pinned
        pieces, base = pinned.pieces, pinned.log.base
        self._step(SnapshotPinned(session, pieces.epoch, base, pieces.sizes, pieces.digest))

    async def _read(self, session: Session, number: int, slices: tuple[Slice, ...]) -> None:
        try:
            pinned = self._pinned.get(session)
            if pinned is None:
                return  # the session has ended
            data = await self._thread.run(partial(self._read_now, pinned, slices))
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception("%s: chunk %d cannot be read", session, number)
            self._step(ChunkUnreadable(session, number, str(error)))
        else:
            self._step(ChunkRead(session, number, data))
        finally:
            self._reading.discard((session, number))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- in the donor's thread ---------------------------------------------------------------------

    def _pin_now(self, session: Session) -> _Pinned:
        reported_at = time.monotonic()

        def progressed(runs: int) -> None:
            nonlocal reported_at
            if session not in self.sessions:
                raise NotMovable("the session has ended")
            if time.monotonic() - reported_at >= PROGRESS_S:
                reported_at = time.monotonic()
                self._server.call(self._step, PinProgressed(session, runs))

        progressed(0)
        log = self._log.pin()
        try:
            snapshot = self._snapshots.pin(self._state())
        except BaseException:
            self._log.unpin(log)
            raise
        try:
            return _Pinned(snapshot, log, Pieces(snapshot.state, self._log, log.base, progressed))
        except BaseException:
            self._log.unpin(log)
            self._snapshots.unpin(snapshot)
            raise

    def _unpin_now(self, pinned: _Pinned) -> None:
        self._log.unpin(pinned.log)
        self._snapshots.unpin(pinned.snapshot)

    def _read_now(self, pinned: _Pinned, slices: Sequence[Slice]) -> bytes:
        kept = self._snapshots.kept_bytes(pinned.snapshot, self._state())
        if kept > SNAPSHOT_BYTES:
            raise RekindleError(
                f"the state after epoch {pinned.snapshot.epoch} keeps {kept:,} bytes beside the "
                f"newest one; at most {SNAPSHOT_BYTES:,} are kept for a partner"
            )
        return pinned.pieces.read(slices)


def _key_of(message: MessageToDonor) -> _Key:
    return message.session, message.number if isinstance(message, ChunkRequest) else None
