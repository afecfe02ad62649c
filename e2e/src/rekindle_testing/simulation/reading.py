"""Reads of a simulated task's output: requests, replies, and the calls of one reader.

A real `ReaderCore` decides which replica is called, and when; calls go over the simulated network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from rekindle.protocol import ConsistencyState, Endpoint
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.streams.reader_core import (
    AbandonCall,
    ReadEpochs,
    ReaderCore,
    ReaderEffect,
    Subscription,
    new_live_batches,
)
from rekindle.streams.replica_choice import FAILURE_MEMORY_S, DeliverEpochs, SwitchReplica
from rekindle.streams.wire import LivePosition, StreamProgress
from rekindle_testing.simulation.network import Network, Refused, TimedOut
from rekindle_testing.simulation.reader_checks import ReaderChecks
from rekindle_testing.simulation.scheduler import SimulatedProcess
from rekindle_testing.simulation.values import is_idle, rows_of, watermark_of

READ_EPOCHS = 16
"""Epochs that a call of a reader returns at most."""
_LEAST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class SimulatedRead:
    """Of a reader: epochs from a number on, of one incarnation; `live`: of all kinds, after a
    position."""

    incarnation: int | None
    from_epoch: int
    live: LivePosition | None = None


@dataclass(frozen=True, slots=True)
class OutputItem:
    """An epoch, or a control with the epoch that it names."""

    kind: BatchKind
    epoch: int
    value: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ReadReply:
    """`items`: consecutive epochs from the requested one on, or of a live request what follows its
    position; none: nothing new. `truncated`: the log no longer has it. `position`: where a live
    reader goes on."""

    progress: StreamProgress
    items: tuple[OutputItem, ...] = ()
    truncated: bool = False
    position: LivePosition | None = None


@dataclass(frozen=True, slots=True)
class Listener:
    """`has_space`: whether it can keep more; `progressed`: called with each response, before its
    epochs; `ended`: after each call."""

    has_space: Callable[[], bool]
    arrived: Callable[[EpochBatch], None]
    progressed: Callable[[StreamProgress], None]
    ended: Callable[[], None]


class SimulatedReader:
    """One subscription of a process."""

    def __init__(
        self,
        process: SimulatedProcess,
        network: Network,
        subscription: Subscription,
        epoch_interval_s: float,
        listener: Listener,
    ) -> None:
        self.core = ReaderCore(subscription, stall_s=2 * epoch_interval_s + 2)
        self.subscription = subscription
        self._process = process
        self._network = network
        self._listener = listener
        self._calling: int | None = None  # the call in progress
        self._wakes_at = inf  # when a back-off ends
        self._endpoints: tuple[Endpoint, ...] = ()
        self._left_at: dict[str, float] = {}  # when a replica failed, or was left
        self._states: dict[str, ConsistencyState] = {}  # what replicas have said last
        self._closed = False
        self._checks = ReaderChecks(
            f"the reader of {subscription.stream}/{subscription.partition} in {process.host}"
        )

    def route(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._endpoints = endpoints
        self._checks.routes_changed(endpoints)
        self._step(partial(self.core.routes_changed, endpoints))

    def better_replica(self) -> str | None:
        """A replica whose output is STABLE, and that has not failed lately, if that of the one that
        is read is not. DPC (Balazinska et al. 2005), section 3.3."""
        current = self.core.choice.current
        read = next((e for e in self._endpoints if e.address == current), None)
        if read is None or ConsistencyState.STABLE in (read.state, self._states.get(read.address)):
            return None
        recently = self._process.scheduler.now - FAILURE_MEMORY_S - 1.0
        for other in self._endpoints:
            is_stable = other.state is self._states.get(other.address, ConsistencyState.STABLE)
            is_stable &= other.state is ConsistencyState.STABLE
            keeps_up = not (other.suspected or other.lagging)
            if is_stable and keeps_up and self._left_at.get(other.address, -inf) < recently:
                return other.address
        return None

    def close(self) -> None:
        self._closed = True

    def wake(self) -> None:
        """It calls again, now or when a back-off ends."""
        if self._closed:
            return
        self._step(partial(self.core.woken, self._listener.has_space()))
        wake_at = self.core.wake_at()
        if wake_at is None or wake_at >= self._wakes_at:
            return
        self._wakes_at = wake_at

        def wake() -> None:
            if self._wakes_at == wake_at:
                self._wakes_at = inf
                self.wake()

        wait_s = wake_at - self._process.scheduler.now
        self._process.after(max(_LEAST_WAIT_S, wait_s), wake)

    def _step(
        self,
        happened: Callable[[float], Sequence[ReaderEffect]],
        received: tuple[EpochBatch, ...] = (),
    ) -> None:
        now, read = self._process.scheduler.now, self.core.choice.current
        for effect in happened(now):
            match effect:
                case SwitchReplica():
                    if read is not None:
                        self._left_at[read] = now
                case ReadEpochs():
                    self._call(effect)
                case AbandonCall():
                    self._calling = None
                case DeliverEpochs(epochs):
                    for batch in received:
                        if batch.epoch in epochs:
                            self._listener.arrived(batch)

    def _call(self, call: ReadEpochs) -> None:
        self._calling = call.call
        self._checks.called(call.address, self._process.scheduler.now)

        def ended(result: ReadReply | Refused | TimedOut) -> None:
            if self._closed:
                return
            if self._calling == call.call:
                self._calling = None
                self._ended(call, result)
            self._listener.ended()

        host = call.address.rpartition(":")[0]
        request = SimulatedRead(call.incarnation, call.epoch, call.position)
        self._network.call(self._process, host, request, ended, call.timeout_s)

    def _ended(self, call: ReadEpochs, result: ReadReply | Refused | TimedOut) -> None:
        if not isinstance(result, ReadReply) or result.truncated:
            truncated, timed_out = isinstance(result, ReadReply), isinstance(result, TimedOut)
            self._left_at[call.address] = self._process.scheduler.now
            self._checks.failed(call.address, self._process.scheduler.now)
            failed = self.core.call_failed
            self._step(partial(failed, call.call, truncated=truncated, timed_out=timed_out))
            return
        self._checks.returned()
        progress, batches = result.progress, tuple(map(self._batch, result.items))
        state = ConsistencyState.STABLE if progress.live is None else progress.live.state
        self._states[call.address] = state
        self._listener.progressed(progress)
        if not self.subscription.live:
            epochs = tuple(batch.epoch for batch in batches)
            returned = partial(self.core.call_returned, call.call, progress.head, epochs, state)
            self._step(returned, batches)
            return
        new, next_epoch, newest = new_live_batches(batches, call.epoch)
        for batch in new:
            self._listener.arrived(batch)
        head, live_returned = progress.head, self.core.live_returned
        self._step(
            partial(live_returned, call.call, head, state, next_epoch, newest, result.position)
        )

    def _batch(self, item: OutputItem) -> EpochBatch:
        s, kind = self.subscription, item.kind
        digest = item.value if kind is BatchKind.STABLE else ""
        rows, watermark = rows_of(item.value), watermark_of(item.value)
        idle, attempt = is_idle(item.value), item.attempt
        return EpochBatch(
            s.stream, s.partition, item.epoch, watermark, rows, digest, kind, attempt, idle
        )
