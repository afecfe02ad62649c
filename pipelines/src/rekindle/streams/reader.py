"""The I/O around `ReaderCore`: a thread that reads one upstream partition, call by call.

When a call is abandoned, its thread is too: a new thread takes over at once. Knows nothing of the
SUnion: it delivers batches and asks whether there is buffer space for more.

Design: docs/design/streams.md#reader.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rekindle.errors import BelowFloor, EpochTooLarge, RekindleError
from rekindle.protocol import Endpoint
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.flight import CallTimedOut, ReadRequest, ReadResponse, StreamClient
from rekindle.streams.reader_core import (
    WAIT_S,
    AbandonCall,
    CallFailed,
    CallReturned,
    CallThreadDied,
    ReadEpochs,
    ReaderCore,
    ReaderEvent,
    ReaderWoken,
    Subscription,
)
from rekindle.streams.replica_choice import DeliverEpochs, RoutesChanged, SwitchReplica
from rekindle.workers import Worker

REQUEST_BYTES = 8 << 20
_IDLE_S = 0.05

_log = logging.getLogger(__name__)


class PartitionReader:
    """Reads until closed. `deliver` is called with new batches in order, `has_buffer_space` before
    each call; both from the reader's thread."""

    def __init__(
        self,
        subscription: Subscription,
        deliver: Callable[[EpochBatch], None],
        has_buffer_space: Callable[[], bool],
        *,
        stall_s: float = 3.0,
        connect: Callable[[str], StreamClient] = StreamClient,
        on_fatal: Callable[[Exception], None] = lambda error: None,
        request_bytes: int = REQUEST_BYTES,
    ) -> None:
        """`on_fatal` is called with errors that no other replica and no retry can avoid.
        `request_bytes`: requested in one call, which returns one epoch at least."""
        self.subscription = subscription
        self._on_fatal = on_fatal
        self._request_bytes = request_bytes
        self._deliver = deliver
        self._has_buffer_space = has_buffer_space
        self._connect = connect
        self._core = ReaderCore(subscription, stall_s)
        self._lock = threading.Condition()
        self._pending_call: ReadEpochs | None = None
        self._current_thread = 0  # number of the thread that makes the calls
        self._closed = False
        self._logged_address: str | None = None
        self._worker: Worker | None = None  # the current thread

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
            if self._worker is not None and self._worker.problem is not None:
                return self._worker.problem
            return self._core.problem()

    def route(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Apply the coordinator's routes; abandon a call if they demand another replica."""
        with self._lock:
            self._step(RoutesChanged(endpoints))
            if self._worker is None and not self._closed:
                self._start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._current_thread += 1
            if self._worker is not None:
                self._worker.stop()
            self._lock.notify_all()

    def _step(self, event: ReaderEvent, received: tuple[EpochBatch, ...] = ()) -> None:
        """Called under the lock."""
        for effect in self._core.step(event, time.monotonic()):
            match effect:
                case ReadEpochs():
                    self._pending_call = effect
                case AbandonCall():
                    self._pending_call = None
                    if not self._closed:
                        self._start()
                case DeliverEpochs(epochs):
                    for batch in received:
                        if batch.epoch in epochs:
                            self._deliver(batch)
                case SwitchReplica(address, epoch):
                    self._switched(address, epoch)

    def _switched(self, address: str | None, epoch: int) -> None:
        s = self.subscription
        if address is not None and address != self._logged_address:
            _log.info("%s/%d: from %s, epoch %d", s.stream, s.partition, address, epoch)
            self._logged_address = address
        self._lock.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _start(self) -> None:
        self._current_thread += 1
        s, thread = self.subscription, self._current_thread
        if self._worker is not None:
            self._worker.stop()
        name = f"read-{s.stream[:8]}-{s.partition}-{thread}"
        self._worker = Worker(name, lambda: self._run(thread)).start()

    def _run(self, thread: int) -> None:
        client: StreamClient | None = None
        with self._lock:
            if thread == self._current_thread:
                self._step(CallThreadDied())
        try:
            while (call := self._next(thread)) is not None:
                if client is None or client.address != call.address:
                    if client is not None:
                        client.close()
                    client = self._connect(call.address)
                if not self._make(thread, client, call):
                    client.close()
                    client = None
        finally:
            if client is not None:
                client.close()

    def _next(self, thread: int) -> ReadEpochs | None:
        """Wait for a call to make; None when the thread has to end."""
        with self._lock:
            while thread == self._current_thread:
                self._step(ReaderWoken(self._has_buffer_space()))
                if self._pending_call is not None:
                    call, self._pending_call = self._pending_call, None
                    return call
                self._lock.wait(_IDLE_S)
        return None

    def _make(self, thread: int, client: StreamClient, call: ReadEpochs) -> bool:
        s = self.subscription
        request = ReadRequest(
            s.stream,
            s.partition,
            call.epoch,
            self._request_bytes,
            WAIT_S,
            s.share,
            call.incarnation,
        )
        try:
            response = client.read(request, call.deadline_s)
        except Exception as error:
            if isinstance(error, EpochTooLarge):
                self._on_fatal(error)
            with self._lock:
                if thread == self._current_thread:
                    self._failed(call, error)
            return False
        with self._lock:
            if thread == self._current_thread:
                self._received(call, response)
        return True

    def _received(self, call: ReadEpochs, response: ReadResponse) -> None:
        epochs = tuple(batch.epoch for batch in response.epochs)
        self._step(CallReturned(call.call, response.progress.head, epochs), tuple(response.epochs))
        if self._worker is not None:
            self._worker.progressed()

    def _failed(self, call: ReadEpochs, error: Exception) -> None:
        s, expected = self.subscription, isinstance(error, RekindleError)
        first = call.address not in self._core.choice.unreadable()
        level = logging.WARNING if first else logging.DEBUG
        stack = None if expected or not first else error
        _log.log(level, "cannot read %s/%d: %s", s.stream, s.partition, error, exc_info=stack)
        self._step(
            CallFailed(
                call.call,
                truncated=isinstance(error, BelowFloor),
                timed_out=isinstance(error, CallTimedOut),
                unexpected=None if expected else f"{call.address} cannot be read: {error!r}",
            )
        )
