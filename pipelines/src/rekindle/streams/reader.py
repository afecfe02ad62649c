"""The I/O around `ReaderCore`: reads one upstream partition, call by call.

All readers of a task share one event loop. A call that is abandoned is cancelled, which closes its
connection, and the next one begins at once. A reader that can make no call has a timer if it waits
for the end of a back-off. If it waits for buffer space it has none: `wake` is called when epochs
are taken. Does not know the SUnion: it delivers batches and checks whether there is buffer space.

Design: docs/design/streams.md#reader.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rekindle.backoff import Backoff
from rekindle.errors import BelowFloor, EpochTooLarge, RekindleError
from rekindle.protocol import ConsistencyState, Endpoint
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import IoThread
from rekindle.streams.reader_core import (
    WAIT_S,
    AbandonCall,
    ReadEpochs,
    ReaderCore,
    ReaderEffect,
    Subscription,
    new_live_batches,
)
from rekindle.streams.replica_choice import DeliverEpochs, SwitchReplica
from rekindle.streams.wire import (
    CallTimedOut,
    ReadRequest,
    ReadResponse,
    StreamProgress,
    StreamRefused,
)
from rekindle.workers import BACKOFF

REQUEST_BYTES = 8 << 20

_log = logging.getLogger(__name__)


class Client(Protocol):
    """What a reader needs of `StreamClient`."""

    @property
    def address(self) -> str: ...
    async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse: ...
    async def close(self) -> None: ...


class PartitionReader:
    """Reads until closed. `deliver` is called with new batches in order, `has_buffer_space` before
    each call; both from the thread of `io`."""

    def __init__(
        self,
        io: IoThread,
        subscription: Subscription,
        deliver: Callable[[EpochBatch], None],
        has_buffer_space: Callable[[], bool],
        *,
        stall_s: float = 3.0,
        connect: Callable[[str], Client] = StreamClient,
        on_fatal: Callable[[Exception], None] = lambda error: None,
        request_bytes: int = REQUEST_BYTES,
        on_progress: Callable[[StreamProgress], None] | None = None,
    ) -> None:
        """`on_fatal` is called with errors that no other replica and no retry can avoid.
        `request_bytes`: requested in one call, which returns one epoch at least; `on_progress` is
        called with the progress of a replica, before its epochs are delivered."""
        self._on_progress = on_progress
        self.subscription = subscription
        self._io = io
        self._on_fatal = on_fatal
        self._request_bytes = request_bytes
        self._deliver = deliver
        self._has_buffer_space = has_buffer_space
        self._connect = connect
        self._core = ReaderCore(subscription, stall_s, random.random)
        self._lock = threading.Lock()  # held while the core changes, and while other threads read
        self._problem: str | None = None  # an error of the reader itself
        self._backoff = Backoff(BACKOFF)
        self._logged_address: str | None = None
        # Used in the event loop only:
        self._closed = False
        self._client: Client | None = None
        self._pending_call: ReadEpochs | None = None
        self._calling: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._backing_off = False  # until the timer, because the reader itself has failed

    # -- from any thread -------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """The newest head that a replica of the upstream has reported."""
        return self._core.head

    def unreadable(self) -> tuple[str, ...]:
        with self._lock:
            return self._core.choice.unreadable()

    def problem(self) -> str | None:
        with self._lock:
            return self._problem or self._core.problem()

    def route(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Apply the coordinator's routes; abandon a call if they require another replica."""
        self._io.call(
            self._guarded, lambda: self._step(partial(self._core.routes_changed, endpoints))
        )

    def close(self) -> None:
        self._io.call(self._close)

    # -- in the event loop -----------------------------------------------------------------------

    def wake(self) -> None:
        """There may be buffer space now."""
        if self._calling is None and not self._closed and not self._backing_off:
            self._guarded(lambda: None)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do `work`, then begin a call if the core requests one. Any error is reported, and the
        reader continues after a back-off."""
        if self._closed:
            return
        try:
            work()
            self._begin_call()
        except Exception as error:
            self._fail_reader(error)

    def _begin_call(self) -> None:
        if self._calling is not None:
            return
        self._step(partial(self._core.woken, self._has_buffer_space()))
        call, self._pending_call = self._pending_call, None
        if call is not None:
            self._calling = asyncio.get_running_loop().create_task(self._make_call(call))
            self._calling.add_done_callback(self._task_ended)
        elif (wake_at := self._core.wake_at()) is not None:
            self._wake_in(wake_at - time.monotonic())

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, seconds), self._timer_fired)

    def _timer_fired(self) -> None:
        self._backing_off = False
        self._guarded(lambda: None)

    def _step(
        self,
        happened: Callable[[float], Sequence[ReaderEffect]],
        received: tuple[EpochBatch, ...] = (),
    ) -> None:
        """`happened`: a method of the core, but for the time."""
        with self._lock:
            effects = happened(time.monotonic())
        for effect in effects:
            match effect:
                case ReadEpochs():
                    self._pending_call = effect
                case AbandonCall():
                    self._abandon()
                case DeliverEpochs(epochs):
                    for batch in received:
                        if batch.epoch in epochs:
                            self._deliver(batch)
                case SwitchReplica(address, epoch):
                    self._switched(address, epoch)

    def _abandon(self) -> None:
        """Cancel the call, whose task may not have begun, and close its connection."""
        calling, self._calling = self._calling, None
        if calling is not None:
            calling.cancel()
        self._leave_client()

    def _leave_client(self) -> None:
        """Close the connection, without waiting for it."""
        client, self._client = self._client, None
        if client is not None:
            closing = asyncio.get_running_loop().create_task(self._close_client(client))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _switched(self, address: str | None, epoch: int) -> None:
        s = self.subscription
        if address is not None and address != self._logged_address:
            _log.info("%s/%d: from %s, epoch %d", s.stream, s.partition, address, epoch)
            self._logged_address = address

    def _fail_reader(self, error: Exception) -> None:
        """An error of the reader itself, not of a replica."""
        s, wait_s = self.subscription, self._backoff.failed()
        _log.error("the reader of %s/%d failed", s.stream, s.partition, exc_info=error)
        self._problem = (
            f"the reader of stream {s.stream}/{s.partition} failed and starts again, at most every "
            f"{BACKOFF.longest_s:g} s: {error!r}"
        )
        if self._calling is None:
            with self._lock:
                self._core.call_lost()
            self._backing_off = True
            self._wake_in(wait_s)

    def _close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._abandon()

    # -- a call ----------------------------------------------------------------------------------

    async def _make_call(self, call: ReadEpochs) -> None:
        """Make a call, and process its result unless it is cancelled."""
        try:
            response = await self._read(self._client_of(call.address), call)
        except Exception as error:
            self._ended(partial(self._failed, call, error))
        else:
            self._ended(partial(self._received, call, response))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Handles a task that has ended without `_ended`, so that the reader does not wait for
        it."""
        if self._calling is task:
            self._calling = None
            self._leave_client()
            error = None if task.cancelled() else task.exception()
            cancelled = RuntimeError("its call was cancelled")
            self._fail_reader(error if isinstance(error, Exception) else cancelled)

    def _ended(self, result: Callable[[], None]) -> None:
        """The call of this task has ended; ignored if it was abandoned."""
        if self._calling is asyncio.current_task():
            self._calling = None
            self._guarded(result)

    def _client_of(self, address: str) -> Client:
        if self._client is not None and self._client.address != address:
            self._leave_client()
        if self._client is None:
            self._client = self._connect(address)
        return self._client

    async def _close_client(self, client: Client) -> None:
        """Errors are only logged: the client is not used again."""
        try:
            await client.close()
        except Exception as error:
            _log.warning("the connection to %s is not closed: %r", client.address, error)

    async def _read(self, client: Client, call: ReadEpochs) -> ReadResponse:
        s = self.subscription
        request = ReadRequest(
            s.stream,
            s.partition,
            call.epoch,
            self._request_bytes,
            WAIT_S,
            s.share,
            call.incarnation,
            call.position,
        )
        return await client.read(request, call.timeout_s)

    def _received(self, call: ReadEpochs, response: ReadResponse) -> None:
        progress = response.progress
        state = ConsistencyState.STABLE if progress.live is None else progress.live.state
        if self._on_progress is not None:
            self._on_progress(progress)
        if self.subscription.live:
            self._live_received(call, response, state)
        else:
            epochs = tuple(batch.epoch for batch in response.epochs)
            returned = partial(self._core.call_returned, call.call, progress.head, epochs, state)
            self._step(returned, response.epochs)
        if self._problem is not None:
            self._problem = None
            self._backoff.succeeded()

    def _live_received(
        self, call: ReadEpochs, response: ReadResponse, state: ConsistencyState
    ) -> None:
        new, next_epoch, newest = new_live_batches(response.epochs, call.epoch)
        for batch in new:
            self._deliver(batch)
        head, returned = response.progress.head, self._core.live_returned
        self._step(partial(returned, call.call, head, state, next_epoch, newest, response.live))

    def _failed(self, call: ReadEpochs, error: Exception) -> None:
        self._leave_client()
        if isinstance(error, EpochTooLarge):
            self._on_fatal(error)
        s, expected = self.subscription, isinstance(error, RekindleError)
        first = call.address not in self._core.choice.unreadable()
        level = logging.WARNING if first else logging.DEBUG
        stack = None if expected or not first else error
        _log.log(level, "cannot read %s/%d: %s", s.stream, s.partition, error, exc_info=stack)
        problem = None if expected else f"{call.address} cannot be read: {error!r}"
        self._step(
            partial(
                self._core.call_failed,
                call.call,
                truncated=isinstance(error, BelowFloor),
                timed_out=isinstance(error, CallTimedOut),
                message=str(error),
                problem=str(error) if isinstance(error, StreamRefused) else problem,
            )
        )
