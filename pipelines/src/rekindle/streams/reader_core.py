"""Which calls a reader of one upstream partition makes, and what it delivers. Pure.

Calls are bounded. Their deadline is a second more than the wait, so that a reader soon switches
from a silent replica; it doubles while an epoch does not arrive in time, because that epoch may be
large. If the coordinator's routes require a switch during a call, the call is abandoned: it is
cancelled, and another one may begin at once. `replica_choice` decides which replica is called.

Design: docs/design/streams.md#reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.exchange.routing import Share
from rekindle.protocol import ConsistencyState, Endpoint
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.streams.replica_choice import DeliverEpochs, ReplicaChoice, SwitchReplica
from rekindle.streams.wire import LivePosition

WAIT_S = 0.5
GRACE_S = 1.0
MAX_TIMEOUT_S = 60.0
_REPORTED_TIMEOUTS = 2
"""Calls for one epoch that may pass their deadline before this is reported as a problem."""
_REPORTED_FAILURES = 8
"""Calls that may fail at each replica before this is reported: some ten seconds."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What one reader reads: a stream partition, or a share of it, from an epoch on. `live`: also
    tentative epochs, UNDO and REC_DONE, in the order of a replica's output."""

    stream: str
    partition: int
    from_epoch: int
    share: Share | None = None
    live: bool = False


@dataclass(frozen=True, slots=True)
class ReadEpochs:
    """Make a call; its result names the number `call`."""

    call: int
    address: str
    incarnation: int | None  # from the routes
    epoch: int
    timeout_s: float
    position: LivePosition | None = None  # of a live call


@dataclass(frozen=True, slots=True)
class AbandonCall:
    """Cancel the call in progress."""


ReaderEffect = ReadEpochs | AbandonCall | DeliverEpochs | SwitchReplica


def new_live_batches(
    batches: Sequence[EpochBatch], next_epoch: int
) -> tuple[list[EpochBatch], int, int]:
    """The batches of a live call that are not older than what was received before, in the order of
    the replica's output; the first epoch needed after them; and the newest epoch among them.
    `next_epoch`: the first one needed before the call."""
    new, newest = [], NO_EPOCH
    for batch in batches:
        if batch.kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE):
            new.append(batch)
        elif batch.epoch >= next_epoch:
            newest = batch.epoch
            next_epoch = newest + (batch.kind is BatchKind.STABLE)
            new.append(batch)
    return new, next_epoch, newest


class ReaderCore:
    """One reader. `head`: the newest one that a replica has reported. `stall_s`: after this time
    without anything new another replica is tried. `draw`: of the jitter of back-offs, 0 to 1."""

    def __init__(
        self,
        subscription: Subscription,
        stall_s: float,
        draw: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.choice = ReplicaChoice(subscription.from_epoch, stall_s, draw, live=subscription.live)
        self.head = NO_EPOCH
        self._live = subscription.live
        self._newest = subscription.from_epoch - 1  # the newest epoch of all live calls
        self._position: tuple[str, LivePosition] | None = None  # address, position in its output
        self._name = f"{subscription.stream}/{subscription.partition}"
        self._incarnations: dict[str, int] = {}  # by address
        self._calls = 0
        self._call: ReadEpochs | None = None  # in progress
        self._reported: str | None = None  # the error of the last call, if it is to be reported
        self._failure: str | None = None  # the error of the last call, of any kind

    def wake_at(self) -> float | None:
        """When `woken` may begin a call; None: after another event, or when there is buffer space
        again."""
        return None if self._call is not None else self.choice.wake_at()

    def problem(self) -> str | None:
        where = f"epoch {self.choice.next_epoch} of stream {self._name}"
        if self._reported is not None:
            return f"{where}: {self._reported}"
        if self.choice.all_truncated():
            return (
                f"{where} is no longer in the log of any replica; the task needs a later restore "
                "point"
            )
        timeouts = self.choice.timeouts
        if timeouts >= _REPORTED_TIMEOUTS:
            return (
                f"{where} did not arrive in {timeouts} calls; the next may take "
                f"{self._timeout_s(timeouts):g} s. If its replicas are healthy it is too large: "
                "use shorter epochs"
            )
        if self._failure is not None and self.choice.failures >= _REPORTED_FAILURES:
            return f"{where} cannot be read from any replica; the latest error: {self._failure}"
        return None

    def _responded(self, call: ReadEpochs, head: int, state: ConsistencyState, now: float) -> None:
        self._reported = self._failure = None
        self.head = max(self.head, head)
        self.choice.record_state(call.address, state, now)

    def call_returned(
        self, number: int, head: int, epochs: Sequence[int], state: ConsistencyState, now: float
    ) -> Sequence[ReaderEffect]:
        """`epochs`: those that the call returned; `head`: the newest epoch that is released to the
        replica; `state`: of its output."""
        if (call := self._ended(number)) is None:
            return []
        self._responded(call, head, state, now)
        return self.choice.epochs_received(call.address, epochs, now)

    def live_returned(
        self,
        number: int,
        head: int,
        state: ConsistencyState,
        next_epoch: int,
        newest: int,
        position: LivePosition | None,
        now: float,
    ) -> Sequence[ReaderEffect]:
        """A live call returned. `position`: from which the next call at this replica continues,
        None if nothing was returned; `next_epoch`: the first epoch that is needed then; `newest`:
        the newest epoch returned."""
        if (call := self._ended(number)) is None:
            return []
        self._responded(call, head, state, now)
        self._newest = max(self._newest, newest)
        if position is not None:
            self._position = call.address, position
        new = position is not None or next_epoch > call.epoch
        return self.choice.live_received(call.address, next_epoch, new, now)

    def _live_position(self, address: str) -> LivePosition | None:
        """Where a live call at this replica continues. After a switch to another replica only
        epochs above the newest one are read (DPC (Balazinska et al. 2005), section 3.5)."""
        if not self._live:
            return None
        if self._position is not None and self._position[0] != address:
            self._position = None
            self.choice.next_epoch = max(self.choice.next_epoch, self._newest + 1)
        return self._position[1] if self._position is not None else LivePosition()

    def routes_changed(self, endpoints: tuple[Endpoint, ...], now: float) -> list[ReaderEffect]:
        self._incarnations = {e.address: e.incarnation for e in endpoints}
        before = self.choice.current
        effects: list[ReaderEffect] = [*self.choice.routes_changed(endpoints, now)]
        if self._call is not None and self.choice.current != before:
            self._call = None
            effects.append(AbandonCall())
        return effects

    def woken(self, has_buffer_space: bool, now: float) -> list[ReaderEffect]:
        """Time has passed, or there may be buffer space for more epochs now."""
        if self._call is not None:
            return []
        effects: list[ReaderEffect] = [*self.choice.woken(now)]
        if (address := self.choice.current) is not None and has_buffer_space:
            self._calls += 1
            position = self._live_position(address)
            self._call = ReadEpochs(
                self._calls,
                address,
                self._incarnations.get(address),
                self.choice.next_epoch,
                self._timeout_s(self.choice.timeouts_extending_call_at(address)),
                position,
            )
            effects.append(self._call)
        return effects

    def call_failed(
        self,
        number: int,
        now: float,
        *,
        truncated: bool = False,
        timed_out: bool = False,
        message: str = "",
        problem: str | None = None,
    ) -> Sequence[ReaderEffect]:
        """After any error the reader switches to another replica. `message`: the error; `problem`:
        to report at once, if another attempt may not help: a refusal, or an unexpected error. Other
        errors are reported after several failures."""
        if (call := self._ended(number)) is None:
            return []
        self._reported, self._failure = problem, message
        return self.choice.call_failed(call.address, now, truncated=truncated, timed_out=timed_out)

    def call_lost(self) -> None:
        """The shell has failed in the call in progress, of which nothing else will be heard."""
        self._call = None

    def _ended(self, number: int) -> ReadEpochs | None:
        """The call, if it has not been abandoned."""
        call = self._call
        if call is None or call.call != number:
            return None
        self._call = None
        return call

    def _timeout_s(self, timeouts: int) -> float:
        doubled = (WAIT_S + GRACE_S) * 2.0 ** min(timeouts, 10)
        return min(doubled, MAX_TIMEOUT_S)
