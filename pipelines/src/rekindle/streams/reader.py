"""The I/O around `ReplicaChoice`: a thread that reads one upstream partition, call by call.

Calls are bounded and the deadline is a second more than the wait, so a silent replica is left soon
by itself; it doubles while one epoch does not come within it, for that one may be large. When the
coordinator's routes say to leave earlier, the thread stuck in a call is left behind: its answer no
longer counts, and another thread goes on at once. Knows nothing of the union: it delivers batches
and asks whether there is room for more.

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
from rekindle.streams.choice import (
    Answered,
    CallFailed,
    Effect,
    ReplicaChoice,
    RoutesChanged,
    SwitchTo,
    Take,
)
from rekindle.streams.epochs import NO_EPOCH, EpochBatch
from rekindle.streams.flight import CallTimedOut, Get, Got, StreamClient
from rekindle.workers import Worker

WAIT_S = 0.5
GRACE_S = 1.0
MAX_DEADLINE_S = 60.0
_LATE = 2
"""So many calls for one epoch past their deadline are worth saying."""
CALL_BYTES = 8 << 20
_IDLE_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subscription:
    """What one reader reads: a stream partition, whole or by share, from an epoch on."""

    stream: str
    partition: int
    from_epoch: int
    share: Share | None = None


class PartitionReader:
    """Reads until closed. `deliver` is called with new batches in order, `has_room` before each
    call; both from the reader's thread."""

    def __init__(
        self,
        subscription: Subscription,
        deliver: Callable[[EpochBatch], None],
        has_room: Callable[[], bool],
        *,
        stall_s: float = 3.0,
        connect: Callable[[str], StreamClient] = StreamClient,
        refuse: Callable[[Exception], None] = lambda error: None,
        call_bytes: int = CALL_BYTES,
    ) -> None:
        """`refuse` is given what no replica and no time will cure. `call_bytes`: asked for in one
        call, which brings one epoch at least."""
        self.subscription = subscription
        self._refuse = refuse
        self._call_bytes = call_bytes
        self._deliver = deliver
        self._has_room = has_room
        self._connect = connect
        self._choice = ReplicaChoice(subscription.from_epoch, stall_s)
        self._lock = threading.Condition()
        self._incarnations: dict[str, int] = {}  # by address, as the routes say
        self._turn = 0  # of the thread whose answers count
        self._closed = False
        self._released = NO_EPOCH
        self._read_last: str | None = None
        self._worker: Worker | None = None  # of the turn
        self._unexpected: str | None = None  # what the last call failed of, if by no known error

    # -- from any thread -------------------------------------------------------------------------

    @property
    def released(self) -> int:
        """Newest epoch that some replica of the upstream says was released."""
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
            if not self._choice.out_of_reach():
                if self._choice.late < _LATE:
                    return None
                return (
                    f"epoch {epoch} of stream {s.stream}/{s.partition} did not come in "
                    f"{self._choice.late} calls, the next may take {self._deadline_s():g} s; if "
                    f"its replicas are well it is too large: use shorter epochs"
                )
            return (
                f"epoch {epoch} of stream {s.stream}/{s.partition} is in no replica's log any "
                f"more; the task needs a later restore point"
            )

    def route(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Take the coordinator's routes; leave a replica in the middle of a call if they say so."""
        with self._lock:
            self._incarnations = {e.address: e.incarnation for e in endpoints}
            asked = self._choice.current
            self._apply(self._choice.step(RoutesChanged(endpoints), time.monotonic()), ())
            if not self._closed and (self._turn == 0 or self._choice.current != asked):
                self._start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._turn += 1
            if self._worker is not None:
                self._worker.stop()
            self._lock.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _start(self) -> None:
        self._turn += 1
        s, turn = self.subscription, self._turn
        if self._worker is not None:
            self._worker.stop()
        name = f"read-{s.stream[:8]}-{s.partition}-{turn}"
        self._worker = Worker(name, lambda: self._run(turn)).start()

    def _run(self, turn: int) -> None:
        client: StreamClient | None = None
        try:
            while (address := self._target(turn)) is not None:
                if client is None or client.address != address:
                    if client is not None:
                        client.close()
                    client = self._connect(address)
                if not self._call(turn, client):
                    client.close()
                    client = None
        finally:
            if client is not None:
                client.close()

    def _target(self, turn: int) -> str | None:
        """Wait for a replica to ask and room for its answer; None when the thread is to end."""
        with self._lock:
            while turn == self._turn:
                if self._choice.current is not None and self._has_room():
                    return self._choice.current
                self._lock.wait(_IDLE_S)
                if turn == self._turn:
                    self._apply(self._choice.wake(time.monotonic()), ())
        return None

    def _call(self, turn: int, client: StreamClient) -> bool:
        s = self.subscription
        with self._lock:
            epoch, deadline_s = self._choice.next_epoch, self._deadline_s()
            incarnation = self._incarnations.get(client.address)
        get = Get(s.stream, s.partition, epoch, self._call_bytes, WAIT_S, s.share, incarnation)
        try:
            got = client.get(get, deadline_s)
        except Exception as error:
            if isinstance(error, EpochTooLarge):
                self._refuse(error)
            with self._lock:
                if turn == self._turn:
                    self._call_failed(client.address, error)
            return False
        with self._lock:
            if turn == self._turn:
                self._unexpected = None
                self._take(client.address, got)
                if self._worker is not None:
                    self._worker.progressed()
        return True

    def _call_failed(self, address: str, error: Exception) -> None:
        """Also by an error that nobody expects: the replica is left as any other that fails."""
        s, expected = self.subscription, isinstance(error, RekindleError)
        first = address not in self._choice.unreadable()
        level = logging.WARNING if first else logging.DEBUG
        stack = None if expected or not first else error
        _log.log(level, "cannot read %s/%d: %s", s.stream, s.partition, error, exc_info=stack)
        self._unexpected = None if expected else f"{address} cannot be read: {error!r}"
        gone, late = isinstance(error, BelowFloor), isinstance(error, CallTimedOut)
        event = CallFailed(address, gone, late)
        self._apply(self._choice.step(event, time.monotonic()), ())

    def _deadline_s(self) -> float:
        doubled = (WAIT_S + GRACE_S) * 2.0 ** min(self._choice.late, 10)
        return min(doubled, MAX_DEADLINE_S)

    def _take(self, address: str, got: Got) -> None:
        self._released = max(self._released, got.head.released)
        event = Answered(address, tuple(b.epoch for b in got.epochs))
        self._apply(self._choice.step(event, time.monotonic()), got.epochs)

    def _apply(self, effects: list[Effect], answered: tuple[EpochBatch, ...]) -> None:
        for effect in effects:
            match effect:
                case Take(epochs):
                    for batch in answered:
                        if batch.epoch in epochs:
                            self._deliver(batch)
                case SwitchTo(address, epoch):
                    s = self.subscription
                    if address is not None and address != self._read_last:
                        _log.info("%s/%d: from %s, epoch %d", s.stream, s.partition, address, epoch)
                        self._read_last = address
                    self._lock.notify_all()
