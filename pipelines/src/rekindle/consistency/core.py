"""The consistency manager of a task: `ConsistencyCore.step(event, now) -> effects`. Pure.

It decides which epochs are processed on the stable branch, and when an epoch is processed without
an input that is missing, on a fork of the stable state. The stable branch is never rolled back:
when the inputs are corrected it goes on where it stopped, and its epochs replace the tentative
ones. One call of the engine is in progress at a time; new input goes first. Does not know the
engine, the log, or who delivers batches.

Design: docs/design/consistency.md.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.5.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import assert_never

from rekindle.consistency.channels import ChannelState
from rekindle.consistency.deadlines import Deadlines
from rekindle.consistency.live_union import LiveUnion
from rekindle.consistency.messages import (
    AnswerPartner,
    BatchReceived,
    ConsistencyEffect,
    ConsistencyInput,
    ConsistencySettings,
    DropFork,
    EmitReconciliationDone,
    EmitUndo,
    EndPostponement,
    ForkState,
    MaxDelayChanged,
    PartnerChanged,
    PartnerPromised,
    PartnerRefused,
    Policy,
    PostponementRequested,
    ProcessStable,
    ProcessTentative,
    PromiseEnded,
    ReadAgain,
    ReadLive,
    RequestPostponement,
    StableProcessed,
    StopLive,
    TentativeProcessed,
    UpstreamReported,
    Woken,
)
from rekindle.consistency.partners import Partners, Permission
from rekindle.consistency.states import ConsistencyEvent, ConsistencyState, consistency_machine
from rekindle.errors import RekindleError
from rekindle.streams.epochs import EpochBatch, EpochInput, Kind
from rekindle.streams.sunion import Channel, SUnion


class InvalidInput(RekindleError):
    """An event that contradicts the effects before it: a bug in the task."""


@dataclass(slots=True)
class Fork:
    """A tentative branch; `last`: its newest epoch, which may be in a call."""

    attempt: int
    last: int
    watermark: int


@dataclass(frozen=True, slots=True)
class StableCall:
    began: float
    through: int


@dataclass(frozen=True, slots=True)
class TentativeCall:
    due: float
    attempt: int
    epoch: int


class ConsistencyCore:
    """One task. `stable_epoch`: the newest one that is out and stable; `buffered`: see
    `ConsistencySettings`."""

    def __init__(self, settings: ConsistencySettings, next_epoch: int, watermark: int) -> None:
        """`watermark`: after `next_epoch - 1`."""
        self.machine = consistency_machine()
        self.stable_epoch = next_epoch - 1
        self._settings = settings
        self._union = SUnion(settings.inputs, next_epoch, watermark, settings.read_ahead_bytes)
        self._live = LiveUnion(settings.inputs, settings.schemas, next_epoch)
        self._channels = {
            c: ChannelState(next_epoch - 1, next_epoch - 1) for c in self._union.channels
        }
        self._deadlines = Deadlines(settings.delay_fraction, settings.max_delay_s, next_epoch)
        self._partners = Partners(settings.replica, settings.has_partner, settings.lease_s)
        self._ready: deque[EpochInput] = deque()  # complete, not processed on the stable branch
        self._ready_bytes = 0
        self._watermark = watermark  # after `stable_epoch`
        self._attempt = settings.first_attempt - 1
        self._fork: Fork | None = None
        self._call: StableCall | TentativeCall | None = None
        self._due: tuple[int, float] | None = None  # the epoch that is due, and since when
        self._progress_at = -math.inf  # of the correction
        self._corrected_through: int | None = None  # by the inputs, if less than was tentative
        self._now = -math.inf

    # -- what others may know --------------------------------------------------------------------

    @property
    def state(self) -> ConsistencyState:
        return self.machine.state

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(self._channels)

    @property
    def tentative_epoch(self) -> int | None:
        """The newest epoch of the tentative branch, if there is one."""
        return self._fork.last if self._fork is not None else None

    def missing(self) -> tuple[Channel, ...]:
        """The channels that the next stable epoch waits for."""
        return self._union.missing()

    def buffered(self) -> tuple[int, int]:
        """Epochs and bytes of rows that are kept, in all buffers."""
        next_epoch = self._union.next_epoch
        ahead = [c.received + 1 - next_epoch for c in self._channels.values()]
        live = [self._live.buffered(c) for c in self._channels]
        return (
            len(self._ready) + sum(ahead) + sum(epochs for epochs, _ in live),
            self._ready_bytes + self._union.buffered_bytes + sum(size for _, size in live),
        )

    def may_read(self, channel: Channel, live: bool = False) -> bool:
        """Whether a subscription may deliver more. One that has what is needed next always may,
        unless complete epochs wait; so no bound blocks another."""
        state = self._channels[channel]
        if live:
            epochs, size = self._live.buffered(channel)
            full = epochs >= self._settings.max_buffered_epochs or size >= self._union.channel_bytes
            needed = not self._live.has(channel, self._live_epoch())
            return state.live_next is not None and (needed or not full)
        ahead = state.received + 1 - self._union.next_epoch
        return (
            not self._is_ready_full()
            and self._union.has_buffer_space(channel)
            and ahead < self._settings.max_buffered_epochs
        )

    @property
    def wake_at(self) -> float | None:
        """When something is decided if no event comes before."""
        return min((at for at in self._wakes() if at > self._now and at != math.inf), default=None)

    # -- events ----------------------------------------------------------------------------------

    def step(self, event: ConsistencyInput, now: float) -> list[ConsistencyEffect]:
        """Raises InvalidTransition, InvalidInput, Diverged."""
        self._now = now
        effects = self._handle(event, now)
        match self.state:
            case ConsistencyState.UP_FAILURE:
                effects += self._try_to_stabilize(now)
            case ConsistencyState.STABILIZATION:
                effects += self._follow_stabilization(now)
        effects += self._schedule(now)
        effects += self._subscribe()
        self._deadlines.forget_before(self._live_epoch(), now)
        return effects

    def _handle(self, event: ConsistencyInput, now: float) -> list[ConsistencyEffect]:
        happened = ConsistencyEvent
        match event:
            case BatchReceived(channel, batch, live):
                self._batch_received(channel, batch, live, now)
            case UpstreamReported(channel, stable, tentative):
                self.machine.step(happened.UPSTREAM_REPORTED)
                self._channels[channel].reported(stable, tentative)
            case StableProcessed(through):
                self.machine.step(happened.STABLE_PROCESSED)
                self._stable_processed(through, now)
            case TentativeProcessed(attempt, epoch):
                self.machine.step(happened.TENTATIVE_PROCESSED)
                self._tentative_processed(attempt, epoch, now)
            case PostponementRequested(replica, lease_s):
                promised = self._partners.requested(replica, lease_s, self.state, now)
                self.machine.step(happened.POSTPONEMENT_REQUESTED)
                return [AnswerPartner(promised, lease_s)]
            case PromiseEnded():
                self.machine.step(happened.PROMISE_ENDED)
                self._partners.promise_ended()
            case PartnerPromised(lease_s):
                self.machine.step(happened.PARTNER_PROMISED)
                self._partners.promised(lease_s)
            case PartnerRefused():
                self.machine.step(happened.PARTNER_REFUSED)
                self._partners.refused(now)
            case PartnerChanged(present):
                self.machine.step(happened.PARTNER_CHANGED)
                self._partners.changed(present)
            case MaxDelayChanged(max_delay_s):
                self.machine.step(happened.MAX_DELAY_CHANGED)
                self._deadlines.max_delay_s = max_delay_s
            case Woken():
                pass
            case _:
                assert_never(event)
        return []

    def _batch_received(self, channel: Channel, batch: EpochBatch, live: bool, now: float) -> None:
        state = self._channels[channel]
        match batch.kind:
            case Kind.STABLE:
                self.machine.step(ConsistencyEvent.STABLE_ARRIVED)
                if not live:
                    self._receive_stable(channel, batch, now)
                state.stable_received(batch.epoch, live)
                self._receive_live(channel, batch, live, now)
            case Kind.TENTATIVE:
                self.machine.step(ConsistencyEvent.TENTATIVE_ARRIVED)
                state.tentative_received(batch.epoch)
                self._receive_live(channel, batch, live, now)
            case Kind.UNDO:
                self.machine.step(ConsistencyEvent.UNDO_ARRIVED)
                state.undone(batch.epoch)
                self._live.undo(channel, batch.epoch)
            case Kind.RECONCILIATION_DONE:
                self.machine.step(ConsistencyEvent.RECONCILIATION_DONE_ARRIVED)
                state.corrected(batch.epoch)
            case _:
                assert_never(batch.kind)

    def _receive_stable(self, channel: Channel, batch: EpochBatch, now: float) -> None:
        """Raises InvalidInput if an epoch was left out, Diverged."""
        received = self._channels[channel].received
        if batch.epoch > received + 1:
            raise InvalidInput(
                f"stable epoch {batch.epoch} of stream {batch.stream}/{batch.partition} follows "
                f"{received}: epochs between them are missing"
            )
        if batch.epoch == self._union.next_epoch:
            self._progress_at = now
        for complete in self._union.add(channel, batch):
            self._ready.append(complete)
            self._ready_bytes += complete.nbytes

    def _receive_live(self, channel: Channel, batch: EpochBatch, live: bool, now: float) -> None:
        """For the tentative branch."""
        state = self._channels[channel]
        if live and state.live_next is not None:
            state.live_next = max(state.live_next, batch.epoch + 1)
        self._deadlines.arrived(batch.epoch, now)
        if self._deadlines.deadline(batch.epoch) > now:
            state.failed = False
        self._live.add(channel, batch)

    def _stable_processed(self, through: int, now: float) -> None:
        call, self._call = self._call, None
        if not isinstance(call, StableCall) or not self.stable_epoch < through <= call.through:
            raise InvalidInput(f"stable epoch {through} was processed, the call was {call}")
        while self._ready and self._ready[0].epoch <= through:
            epoch = self._ready.popleft()
            self._ready_bytes -= epoch.nbytes
            self._watermark = epoch.watermark
        self.stable_epoch = through
        self._progress_at = now
        self._live.advance(self._live_epoch())
        if self.state is ConsistencyState.STABLE:
            self._deadlines.processed(now - call.began)

    def _tentative_processed(self, attempt: int, epoch: int, now: float) -> None:
        call, self._call = self._call, None
        if not isinstance(call, TentativeCall) or (attempt, epoch) != (call.attempt, call.epoch):
            raise InvalidInput(f"tentative epoch {epoch} was processed, the call was {call}")
        self._deadlines.processed(now - call.due)

    # -- from UP_FAILURE to STABILIZATION --------------------------------------------------------

    def _try_to_stabilize(self, now: float) -> list[ConsistencyEffect]:
        """Not while an epoch is being processed: UNDO follows what it undoes."""
        if self._call is not None or not self._are_inputs_corrected():
            return []
        match self._partners.permission(now):
            case Permission.WAIT:
                return []
            case Permission.ASK:
                self._partners.asked(now)
                return [RequestPostponement(self._partners.lease_s)]
            case Permission.BEGIN:
                return self._stabilize(now)

    def _are_inputs_corrected(self) -> bool:
        """Also if no more can be buffered: then only the stable branch makes space."""
        through, next_epoch = self._tentative_through(), self.stable_epoch + 1
        corrected = (c.is_corrected(through, next_epoch) for c in self._channels.values())
        return self._is_ready_full() or all(corrected)

    def _tentative_through(self) -> int:
        """The newest epoch that has to be corrected."""
        last = self._fork.last if self._fork is not None else self.stable_epoch
        return max(last, self.stable_epoch + 1)

    def _stabilize(self, now: float) -> list[ConsistencyEffect]:
        self.machine.step(ConsistencyEvent.INPUTS_CORRECTED)
        self._progress_at = now
        through = self._tentative_through()
        ended = [c.corrected_through for c in self._channels.values() if c.stable < through]
        self._corrected_through = min(ended, default=None) if not self._is_ready_full() else None
        return [
            EmitUndo(self.stable_epoch + 1),
            *(
                ReadAgain(channel, state.received + 1)
                for channel, state in self._channels.items()
                if state.live_next is not None and state.received + 1 < state.live_next
            ),
        ]

    # -- the end of STABILIZATION ----------------------------------------------------------------

    def _follow_stabilization(self, now: float) -> list[ConsistencyEffect]:
        effects: list[ConsistencyEffect] = []
        if self._partners.renewal_due(now):
            self._partners.asked(now)
            effects.append(RequestPostponement(self._partners.lease_s))
        fork = self._fork
        if isinstance(self._call, TentativeCall):
            return effects
        if fork is not None and fork.last <= self.stable_epoch:
            effects += self._drop_fork()
        if self._call is not None or self._ready:
            return effects
        if self._is_interrupted() or now >= self._stalled_at():
            return [*effects, *self._fail_again(now)]
        if self._fork is None and self._deadlines.deadline(self.stable_epoch + 1) > now:
            return [*effects, *self._end(ConsistencyEvent.RECONCILED, now)]
        return effects

    def _is_interrupted(self) -> bool:
        """An input was corrected only in part before it failed again, and that part is done."""
        corrected, next_epoch = self._corrected_through, self._union.next_epoch
        if self._fork is None or corrected is None or self.stable_epoch < corrected:
            return False
        return any(self._channels[c].stable < next_epoch for c in self._union.missing())

    def _stalled_at(self) -> float:
        """When the next stable epoch has waited too long for a channel."""
        next_epoch = self._union.next_epoch
        if next_epoch > self._deadlines.newest:
            return math.inf
        since = max(self._deadlines.first_arrival(next_epoch), self._progress_at)
        return since + self._deadlines.wait_s

    def _fail_again(self, now: float) -> list[ConsistencyEffect]:
        effects = self._end(ConsistencyEvent.INPUT_FAILED_AGAIN, now)
        self._forget_announcements()
        return effects

    def _end(self, event: ConsistencyEvent, now: float) -> list[ConsistencyEffect]:
        self.machine.step(event)
        self._corrected_through = None
        effects: list[ConsistencyEffect] = [EmitReconciliationDone(self.stable_epoch)]
        return [*effects, EndPostponement()] if self._partners.ended(now) else effects

    def _drop_fork(self) -> list[ConsistencyEffect]:
        assert self._fork is not None
        attempt, self._fork, self._due = self._fork.attempt, None, None
        self._live.advance(self._live_epoch())
        return [DropFork(attempt)]

    def _forget_announcements(self) -> None:
        for channel in self._union.missing():
            self._channels[channel].lost()

    # -- which epoch next ------------------------------------------------------------------------

    def _schedule(self, now: float) -> list[ConsistencyEffect]:
        """New input goes first, where the stable branch is not there yet."""
        self._note_due(now)
        if self._call is not None:
            return []
        is_failure = self.state is ConsistencyState.UP_FAILURE
        if self._due is None or (self._fork is None and self._ready and not is_failure):
            return self._process_stable(now)
        effects: list[ConsistencyEffect] = []
        if self.state is ConsistencyState.STABILIZATION and self._fork is None:
            effects += self._fail_again(now)  # the stable branch is here, and an input is missing
        return [*effects, *self._process_tentative(now)]

    def _process_stable(self, now: float) -> list[ConsistencyEffect]:
        if self.state is ConsistencyState.UP_FAILURE or not self._ready:
            return []
        epochs = tuple(self._ready)[: self._settings.max_call_epochs]
        self._call = StableCall(now, epochs[-1].epoch)
        return [ProcessStable(epochs)]

    def _process_tentative(self, now: float) -> list[ConsistencyEffect]:
        assert self._due is not None
        if self.state is ConsistencyState.STABLE:
            self._forget_announcements()
        self.machine.step(ConsistencyEvent.TENTATIVE_DUE)
        (epoch, due), self._due = self._due, None
        effects: list[ConsistencyEffect] = []
        fork = self._fork
        if fork is None:
            self._attempt += 1
            fork = self._fork = Fork(self._attempt, self.stable_epoch, self._watermark)
            effects.append(ForkState(fork.attempt, self.stable_epoch))
        overdue = self._deadlines.deadline(epoch) <= now
        for channel, state in self._channels.items():
            state.failed |= overdue and self._is_awaited(channel, epoch)
        formed, present = self._live.form(epoch, fork.watermark)
        fork.last, fork.watermark = epoch, formed.watermark
        self._live.advance(epoch + 1)
        self._call = TentativeCall(due, fork.attempt, epoch)
        return [*effects, ProcessTentative(fork.attempt, formed, present)]

    def _live_epoch(self) -> int:
        """The next epoch of new input."""
        last = self._fork.last if self._fork is not None else self.stable_epoch
        return max(last, self.stable_epoch) + 1

    def _note_due(self, now: float) -> None:
        epoch = self._live_epoch()
        if now < self._due_at(epoch, now):
            self._due = None
        elif self._due is None or self._due[0] != epoch:
            self._due = (epoch, now)

    def _due_at(self, epoch: int, now: float) -> float:
        """When an epoch is processed with what is there; infinite if it has to wait."""
        policy = self._policy(now)
        deadline = self._deadlines.deadline(epoch)
        if policy is Policy.SUSPEND or deadline == math.inf or not self._can_form(epoch):
            return math.inf
        waits = self._fork is None or any(
            self._is_awaited(c, epoch) and not s.failed for c, s in self._channels.items()
        )
        return deadline if policy is Policy.DELAY or waits else -math.inf

    def _policy(self, now: float) -> Policy:
        match self.state:
            case ConsistencyState.STABLE:
                return Policy.DELAY  # the first line of defence (section 5.1)
            case ConsistencyState.UP_FAILURE:
                return self._settings.during_failure
            case ConsistencyState.STABILIZATION:
                served = self._partners.served(now)
                return Policy.SUSPEND if served else self._settings.during_stabilization

    def _is_awaited(self, channel: Channel, epoch: int) -> bool:
        return not (self._live.has(channel, epoch) or self._live.passed(channel, epoch))

    def _can_form(self, epoch: int) -> bool:
        """Whether an epoch has all of its blocking inputs."""
        return all(
            self._live.has(channel, epoch)
            for channel in self._channels
            if channel.input in self._settings.blocking
        )

    # -- subscriptions and time ------------------------------------------------------------------

    def _is_ready_full(self) -> bool:
        settings = self._settings
        return (
            self._ready_bytes >= settings.read_ahead_bytes
            or len(self._ready) >= settings.max_buffered_epochs
        )

    def _subscribe(self) -> list[ConsistencyEffect]:
        """A channel is read live when its upstream is tentative, when its stable epochs come too
        late for the tentative branch, and when no more of them can be kept for later."""
        effects: list[ConsistencyEffect] = []
        for channel, state in self._channels.items():
            wanted = self._wants_live(channel, state)
            if wanted and state.live_next is None:
                state.live_next = max(state.received + 1, self._live_epoch())
                effects.append(ReadLive(channel, state.live_next))
            elif not wanted and state.live_next is not None:
                state.live_next = None
                effects.append(StopLive(channel))
        return effects

    def _wants_live(self, channel: Channel, state: ChannelState) -> bool:
        if self._deadlines.max_delay_s is None:
            return False
        if self.state is ConsistencyState.STABLE:
            return state.is_tentative
        behind = state.stable >= self._live_epoch() > state.received + 1
        kept = state.live_next is not None
        return kept or behind or state.is_tentative or not self.may_read(channel)

    def _wakes(self) -> list[float]:
        wakes = [self._due_at(self._live_epoch(), self._now)]
        if self.state is not ConsistencyState.STABLE:
            wakes += self._partners.wakes()
        if self.state is ConsistencyState.STABILIZATION:
            wakes.append(self._stalled_at())
        return wakes
