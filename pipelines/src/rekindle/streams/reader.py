"""The I/O around `ReplicaChoice`: a thread that reads one upstream partition, call by call.

Calls are bounded. Their deadline is a second more than the wait, so that a silent replica is left
soon; it doubles while an epoch does not arrive in time, because that epoch may be large. When
the coordinator's routes demand a switch during a call, the thread in the call is abandoned: its
result is ignored, and a new thread takes over at once. Knows nothing of the SUnion: it delivers
batches and asks whether there is capacity for more.

Design: docs/design/streams.md#reader.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.errors import BelowFloor, EpochTooLarge, RekindleError
from rekindle.exchange.routing import Share
from rekindle.protocol import Endpoint
from rekindle.streams.epochs import NO_EPOCH, EpochBatch
from rekindle.streams.flight import CallTimedOut, ReadRequest, ReadResponse, StreamClient
from rekindle.streams.replica_choice import (
    CallFailed,
    DeliverEpochs,
    Effect,
    EpochsReceived,
    ReplicaChoice,
    RoutesChanged,
    SwitchReplica,
)
from rekindle.workers import Worker

WAIT_S = 0.5
GRACE_S = 1.0
MAX_DEADLINE_S = 60.0
_REPORTED_TIMEOUTS = 2
"""Calls for one epoch that may pass their deadline before this is reported as a problem."""
CALL_BYTES = 8 << 20
_IDLE_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subscription:
    """What one reader reads: a stream partition, or a share of it, from an epoch on."""

    stream: str
    partition: int
    from_epoch: int
    share: Share | None = None


class PartitionReader:
    """Reads until closed. `deliver` is called with new batches in order, `has_capacity` before each
    call; both from the reader's thread."""

    def __init__(
        self,
        subscription: Subscription,
        deliver: Callable[[EpochBatch], None],
        has_capacity: Callable[[], bool],
        *,
        stall_s: float = 3.0,
        connect: Callable[[str], StreamClient] = StreamClient,
        on_fatal: Callable[[Exception], None] = lambda error: None,
        call_bytes: int = CALL_BYTES,
    ) -> None:
        """`on_fatal` is called with errors that no other replica and no retry can avoid.
        `call_bytes`: requested in one call, which returns one epoch at least."""
        self.subscription = subscription
        self._on_fatal = on_fatal
        self._call_bytes = call_bytes
        self._deliver = deliver
        self._has_capacity = has_capacity
        self._connect = connect
        self._choice = ReplicaChoice(subscription.from_epoch, stall_s)
        self._lock = threading.Condition()
        self._incarnations: dict[str, int] = {}  # by address, as the routes say
        self._current_thread = 0  # number of the thread whose results count
        self._closed = False
        self._released = NO_EPOCH
        self._logged_address: str | None = None
        self._worker: Worker | None = None  # the current thread
        self._unexpected: str | None = None  # error of the last call, if not a known one

    # -- from any thread -------------------------------------------------------------------------

    @property
    def released(self) -> int:
        """Newest epoch that some replica of the upstream has reported as released."""
        return self._released

    def unreadable(self) -> tuple[str, ...]:
        with self._lock:
            return self._choice.unreadable()

    def problem(self) -> str | None:
        with self._lock:
            s, epoch = self.subscription, self._choice.next_epoch
            if self._worker is not None and self._worker.problem is not None:
                return self._worker.problem
            if self._unexpected is not None:
                return f"epoch {epoch} of stream {s.stream}/{s.partition}: {self._unexpected}"
            if not self._choice.all_truncated():
                if self._choice.timeouts < _REPORTED_TIMEOUTS:
                    return None
                return (
                    f"epoch {epoch} of stream {s.stream}/{s.partition} did not arrive in "
                    f"{self._choice.timeouts} calls; the next may take {self._deadline_s():g} s. "
                    f"If its replicas are healthy it is too large: use shorter epochs"
                )
            return (
                f"epoch {epoch} of stream {s.stream}/{s.partition} is no longer in the log of any "
                f"replica; the task needs a later restore point"
            )

    def route(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Apply the coordinator's routes; abandon a call if they demand another replica."""
        with self._lock:
            self._incarnations = {e.address: e.incarnation for e in endpoints}
            before = self._choice.current
            self._apply(self._choice.step(RoutesChanged(endpoints), time.monotonic()), ())
            if not self._closed and (self._current_thread == 0 or self._choice.current != before):
                self._start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._current_thread += 1
            if self._worker is not None:
                self._worker.stop()
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
        try:
            while (address := self._target(thread)) is not None:
                if client is None or client.address != address:
                    if client is not None:
                        client.close()
                    client = self._connect(address)
                if not self._call(thread, client):
                    client.close()
                    client = None
        finally:
            if client is not None:
                client.close()

    def _target(self, thread: int) -> str | None:
        """Wait for a replica to call and for capacity; None when the thread has to end."""
        with self._lock:
            while thread == self._current_thread:
                if self._choice.current is not None and self._has_capacity():
                    return self._choice.current
                self._lock.wait(_IDLE_S)
                if thread == self._current_thread:
                    self._apply(self._choice.wake(time.monotonic()), ())
        return None

    def _call(self, thread: int, client: StreamClient) -> bool:
        s = self.subscription
        with self._lock:
            epoch, deadline_s = self._choice.next_epoch, self._deadline_s()
            incarnation = self._incarnations.get(client.address)
        request = ReadRequest(
            s.stream, s.partition, epoch, self._call_bytes, WAIT_S, s.share, incarnation
        )
        try:
            response = client.read(request, deadline_s)
        except Exception as error:
            if isinstance(error, EpochTooLarge):
                self._on_fatal(error)
            with self._lock:
                if thread == self._current_thread:
                    self._call_failed(client.address, error)
            return False
        with self._lock:
            if thread == self._current_thread:
                self._unexpected = None
                self._received(client.address, response)
                if self._worker is not None:
                    self._worker.progressed()
        return True

    def _call_failed(self, address: str, error: Exception) -> None:
        """After unexpected errors, too, the reader switches to another replica."""
        s, expected = self.subscription, isinstance(error, RekindleError)
        first = address not in self._choice.unreadable()
        level = logging.WARNING if first else logging.DEBUG
        stack = None if expected or not first else error
        _log.log(level, "cannot read %s/%d: %s", s.stream, s.partition, error, exc_info=stack)
        self._unexpected = None if expected else f"{address} cannot be read: {error!r}"
        event = CallFailed(
            address,
            truncated=isinstance(error, BelowFloor),
            timed_out=isinstance(error, CallTimedOut),
        )
        self._apply(self._choice.step(event, time.monotonic()), ())

    def _deadline_s(self) -> float:
        doubled = (WAIT_S + GRACE_S) * 2.0 ** min(self._choice.timeouts, 10)
        return min(doubled, MAX_DEADLINE_S)

    def _received(self, address: str, response: ReadResponse) -> None:
        self._released = max(self._released, response.progress.released)
        event = EpochsReceived(address, tuple(b.epoch for b in response.epochs))
        self._apply(self._choice.step(event, time.monotonic()), response.epochs)

    def _apply(self, effects: list[Effect], received: tuple[EpochBatch, ...]) -> None:
        for effect in effects:
            match effect:
                case DeliverEpochs(epochs):
                    for batch in received:
                        if batch.epoch in epochs:
                            self._deliver(batch)
                case SwitchReplica(address, epoch):
                    s = self.subscription
                    if address is not None and address != self._logged_address:
                        _log.info("%s/%d: from %s, epoch %d", s.stream, s.partition, address, epoch)
                        self._logged_address = address
                    self._lock.notify_all()
