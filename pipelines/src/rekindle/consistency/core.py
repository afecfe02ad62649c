"""The consistency manager of a task: what happened is a method, which returns effects. Pure.

It decides which epochs are processed on the stable branch, and when an epoch is processed without
an input that is missing, on a fork of the stable state. The stable branch is never rolled back:
when the inputs are corrected it goes on where it stopped, and its epochs replace the tentative
ones. One call of the engine is in progress at a time; if both branches have epochs to process, they
get equal shares of its time. While one of two replicas stabilizes, its partner serves readers and
postpones its own stabilization (`partners`).
Does not know the engine, the log, or who delivers batches.

Design: docs/design/consistency.md.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.5.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.consistency.deadlines import Deadlines
from rekindle.consistency.inputs import ReceivedInputs
from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencyEffect,
    ConsistencySettings,
    DropFork,
    EmitReconciliationDone,
    EmitUndo,
    EndPostponement,
    ForkState,
    InvalidInput,
    Policy,
    ProcessStable,
    ProcessTentative,
    RequestPostponement,
)
from rekindle.consistency.partners import Partners, Permission
from rekindle.consistency.states import ConsistencyState, consistency_machine
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, EpochInput
from rekindle.streams.sunion import Channel


@dataclass(slots=True)
class Fork:
    """A tentative branch; `last`: its newest epoch, which may be in a call."""

    attempt: int
    last: int
    watermark: int


@dataclass(frozen=True, slots=True)
class StableCall:
    """`through`: the newest epoch in it, once it has taken them."""

    began_at: float
    through: int = NO_EPOCH


@dataclass(frozen=True, slots=True)
class TentativeCall:
    due_at: float
    began_at: float
    attempt: int
    epoch: int


class ConsistencyCore:
    """One task. `stable_epoch`: the newest stable one in the log; for the bounds of `buffered` see
    `ConsistencySettings`."""

    def __init__(self, settings: ConsistencySettings, next_epoch: int, watermark: int) -> None:
        """`watermark`: after `next_epoch - 1`."""
        self.machine = consistency_machine()
        self.stable_epoch = next_epoch - 1
        self._settings = settings
        self._may_be_tentative = settings.max_delay_s is not None
        self._inputs = ReceivedInputs(settings, next_epoch, watermark)
        self._deadlines = Deadlines(settings.delay_fraction, settings.max_delay_s, next_epoch)
        self._partners = Partners(settings.replica, settings.has_partner, settings.lease_s)
        self._watermark = watermark  # after `stable_epoch`
        self._attempt = settings.first_attempt - 1
        self._fork: Fork | None = None
        self._call: StableCall | TentativeCall | None = None
        self._due: tuple[int, float] | None = None  # the epoch that is due, and since when
        self._progress_at = -math.inf  # when the stable branch last got input or processed an epoch
        self._waiting_since = math.inf  # since when complete epochs wait for the end of a failure
        self._lead_s = 0.0  # engine time of the stable branch minus that of the fork
        # The epoch through which inputs are corrected, if they were tentative beyond it.
        self._corrected_through: int | None = None
        self._now = -math.inf

    # -- state for callers -----------------------------------------------------------------------

    @property
    def state(self) -> ConsistencyState:
        return self.machine.state

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(self._inputs.channels)

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not complete."""
        return self._inputs.next_epoch

    @property
    def tentative_epoch(self) -> int | None:
        """The newest epoch of the tentative branch, if there is one."""
        return self._fork.last if self._fork is not None else None

    def missing(self) -> tuple[Channel, ...]:
        """The channels that the next stable epoch waits for."""
        return self._inputs.missing()

    def is_served(self, now: float) -> bool:
        """Whether the partner has promised to serve in place of this replica."""
        return self._partners.served(now)

    def suspends(self, now: float) -> bool:
        """Whether new input waits until corrections are done."""
        correcting = self.state is ConsistencyState.STABILIZATION
        return correcting and self._policy(now) is Policy.SUSPEND

    def buffered(self) -> tuple[int, int]:
        """Epochs and bytes of rows that are kept, in all buffers."""
        return self._inputs.buffered()

    def may_read(self, channel: Channel, live: bool = False) -> bool:
        """Whether a subscription may deliver more. `live`: the one that has tentative epochs too
        (`ReadLive`), not the stable one. A subscription that delivers the epoch that is needed next
        always may, unless too many complete epochs wait. So a full buffer cannot block progress."""
        if live:
            return self._inputs.may_read_live(channel, self._live_epoch())
        return self._inputs.may_read(channel)

    @property
    def wake_at(self) -> float | None:
        """When `woken` has something to decide, if nothing happens before."""
        return min((at for at in self._wakes() if at > self._now and at != math.inf), default=None)

    # -- events; they raise InvalidTransition, InvalidInput, DifferentResults --------------------

    def batch_received(
        self, channel: Channel, batch: EpochBatch, now: float, *, live: bool = False
    ) -> list[ConsistencyEffect]:
        """A batch of a channel; an UNDO names the first epoch undone, a REC_DONE the last one
        corrected. `live`: from the subscription that `ReadLive` began, which delivers all kinds in
        the upstream's order. The other one delivers stable epochs in order, without gaps, and
        REC_DONE."""
        if not self._may_be_tentative:  # then there is one state, and no epoch has a deadline
            self._inputs.receive_stable(channel, batch)
            return self._process_stable(now)
        self.machine.step("batch_received")
        if self._inputs.receive(channel, batch, live):
            self._progress_at = now
        if batch.kind in (BatchKind.STABLE, BatchKind.TENTATIVE):
            self._deadlines.arrived(batch.epoch, now)
            if self._deadlines.deadline(batch.epoch) > now:
                self._inputs.channels[channel].failed = False
        return self._decide(now)

    def upstream_reported(
        self, channel: Channel, stable: int, tentative: int, now: float
    ) -> list[ConsistencyEffect]:
        """The newest stable and the newest tentative epoch that the channel's upstream can
        deliver."""
        self.machine.step("upstream_reported")
        self._inputs.channels[channel].reported(stable, tentative)
        return self._decide(now)

    def stable_processed(self, through: int, now: float) -> list[ConsistencyEffect]:
        """The stable epochs through this one are in the log."""
        if self._may_be_tentative:
            self.machine.step("stable_processed")
        call, self._call = self._call, None
        if not isinstance(call, StableCall) or not self.stable_epoch < through <= call.through:
            raise InvalidInput(f"stable epoch {through} was processed, the call was {call}")
        self._watermark = self._inputs.processed(through)
        self.stable_epoch = through
        if not self._may_be_tentative:
            return self._process_stable(now)
        self._progress_at = now
        self._inputs.live.advance(self._live_epoch())
        took_s = now - call.began_at
        # At most this call: time in which the fork had nothing to process is not owed to it.
        self._lead_s = min(self._lead_s + took_s, took_s)
        if self.state is ConsistencyState.STABLE:
            self._deadlines.processed(took_s, now)
        return self._decide(now)

    def tentative_processed(self, attempt: int, epoch: int, now: float) -> list[ConsistencyEffect]:
        """The tentative epoch is in the branch of its attempt."""
        self.machine.step("tentative_processed")
        call, self._call = self._call, None
        if not isinstance(call, TentativeCall) or (attempt, epoch) != (call.attempt, call.epoch):
            raise InvalidInput(f"tentative epoch {epoch} was processed, the call was {call}")
        self._lead_s -= now - call.began_at
        self._deadlines.processed(now - call.due_at, now)
        return self._decide(now)

    def postponement_requested(
        self, replica: int, lease_s: float, now: float
    ) -> list[ConsistencyEffect]:
        """A partner wants to stabilize while this replica serves, for at most `lease_s` from
        now."""
        is_stabilizing = self.state is ConsistencyState.STABILIZATION and not self._caught_up()
        promised = self._partners.requested(replica, lease_s, is_stabilizing, now)
        self.machine.step("postponement_requested")
        return [AnswerPartner(promised, lease_s), *self._decide(now)]

    def promise_ended(self, now: float) -> list[ConsistencyEffect]:
        """The partner no longer needs what was promised."""
        self.machine.step("promise_ended")
        self._partners.promise_ended()
        return self._decide(now)

    def partner_promised(self, lease_s: float, now: float) -> list[ConsistencyEffect]:
        """The partner serves for `lease_s` from when it was asked."""
        self.machine.step("partner_promised")
        self._partners.promised(lease_s)
        return self._decide(now)

    def partner_refused(self, now: float) -> list[ConsistencyEffect]:
        self.machine.step("partner_refused")
        self._partners.refused(now)
        return self._decide(now)

    def partner_changed(self, present: bool, now: float) -> list[ConsistencyEffect]:
        """Whether there is a partner that serves readers."""
        self.machine.step("partner_changed")
        self._partners.changed(present)
        return self._decide(now)

    def max_delay_changed(self, max_delay_s: float | None, now: float) -> list[ConsistencyEffect]:
        """The task begins or ends catching up, during which it is infinite. Ignored if that of the
        settings is."""
        self.machine.step("max_delay_changed")
        self._deadlines.max_delay_s = max_delay_s
        return self._decide(now)

    def woken(self, now: float) -> list[ConsistencyEffect]:
        """Time has passed."""
        return self._decide(now)

    def _decide(self, now: float) -> list[ConsistencyEffect]:
        """What follows from anything that happened."""
        self._now = now
        if not self._may_be_tentative:
            return self._process_stable(now)
        effects: list[ConsistencyEffect] = []
        self._note_waiting(now)
        match self.state:
            case ConsistencyState.UP_FAILURE:
                effects += self._try_to_stabilize(now)
            case ConsistencyState.STABILIZATION:
                effects += self._follow_stabilization(now)
        effects += self._schedule(now)
        effects += self._inputs.subscribe(
            self.state is not ConsistencyState.STABLE,
            self._deadlines.max_delay_s is not None,
            self._live_epoch(),
        )
        self._deadlines.forget_before(self._live_epoch(), now)
        return effects

    # -- from UP_FAILURE to STABILIZATION --------------------------------------------------------

    def _try_to_stabilize(self, now: float) -> list[ConsistencyEffect]:
        """Not while an epoch is being processed: UNDO follows what it undoes."""
        corrected = self._inputs.are_corrected(self._tentative_through(), self.stable_epoch + 1)
        waited = now >= self._waiting_since + self._deadlines.complete_wait_s
        if self._call is not None or not (corrected or waited):
            return []
        match self._partners.permission(now):
            case Permission.WAIT:
                return []
            case Permission.ASK:
                self._partners.asked(now)
                return [RequestPostponement(self._partners.lease_s)]
            case Permission.BEGIN:
                return self._stabilize(now)

    def _note_waiting(self, now: float) -> None:
        waits = self.state is ConsistencyState.UP_FAILURE and self._inputs.has_ready
        self._waiting_since = min(self._waiting_since, now) if waits else math.inf

    def _tentative_through(self) -> int:
        """The newest epoch that has to be corrected."""
        last = self._fork.last if self._fork is not None else self.stable_epoch
        return max(last, self.stable_epoch + 1)

    def _stabilize(self, now: float) -> list[ConsistencyEffect]:
        self.machine.step("stabilize")
        self._progress_at = now
        self._lead_s = 0.0
        self._corrected_through = self._inputs.corrected_through(
            self._tentative_through(), self.stable_epoch + 1
        )
        return [EmitUndo(self.stable_epoch + 1), *self._inputs.read_again()]

    # -- the end of STABILIZATION ----------------------------------------------------------------

    def _follow_stabilization(self, now: float) -> list[ConsistencyEffect]:
        effects: list[ConsistencyEffect] = []
        if self._caught_up():
            effects += self._end_postponement(now)
        elif self._partners.renewal_due(now):
            self._partners.asked(now)
            effects.append(RequestPostponement(self._partners.lease_s))
        fork = self._fork
        if isinstance(self._call, TentativeCall):
            return effects
        if fork is not None and fork.last <= self.stable_epoch:
            effects += self._drop_fork()
        if self._call is not None:
            return effects
        if self._is_reconciled(now):
            return [*effects, *self._reconcile(now)]
        if self._inputs.has_ready:
            return effects
        if self._is_interrupted() or now >= self._stalled_at():
            return [*effects, *self._fail_again(now)]
        return effects

    def _is_reconciled(self, now: float) -> bool:
        """The stable branch has passed the fork, no input is overdue, and all that upstreams can
        deliver fits into one call. (It is not required that no epoch is left: an engine that is as
        fast as its input always has one to process.)"""
        behind = self._inputs.deliverable_through - self.stable_epoch
        fits = behind <= self._settings.max_call_epochs
        overdue = self._deadlines.deadline(self._inputs.next_epoch) <= now
        return self._fork is None and fits and not overdue

    def _caught_up(self) -> bool:
        """All that is complete is corrected, and an upstream does not have the next epoch."""
        idle = not isinstance(self._call, StableCall) and not self._inputs.has_ready
        return idle and self._inputs.are_missing_upstream()

    def _is_interrupted(self) -> bool:
        """An input was corrected only in part before it failed again, and that part is done."""
        corrected = self._corrected_through
        done = corrected is not None and self.stable_epoch >= corrected
        return done and self._fork is not None and self._inputs.are_missing_upstream()

    def _stalled_at(self) -> float:
        """When the next stable epoch has waited too long for a channel."""
        next_epoch = self._inputs.next_epoch
        if next_epoch > self._deadlines.newest:
            return math.inf
        since = max(self._deadlines.first_arrival(next_epoch), self._progress_at)
        return since + self._deadlines.wait_s

    def _fail_again(self, now: float) -> list[ConsistencyEffect]:
        self.machine.step("fail_again")
        self._inputs.forget_reported()  # what upstreams had, but did not deliver
        return self._end(now)

    def _reconcile(self, now: float) -> list[ConsistencyEffect]:
        self.machine.step("reconcile")
        return self._end(now)

    def _end(self, now: float) -> list[ConsistencyEffect]:
        self._corrected_through = None
        return [EmitReconciliationDone(self.stable_epoch), *self._end_postponement(now)]

    def _end_postponement(self, now: float) -> list[ConsistencyEffect]:
        return [EndPostponement()] if self._partners.ended(now) else []

    def _drop_fork(self) -> list[ConsistencyEffect]:
        assert self._fork is not None
        attempt, self._fork, self._due = self._fork.attempt, None, None
        self._inputs.live.advance(self._live_epoch())
        return [DropFork(attempt)]

    # -- which epoch next ------------------------------------------------------------------------

    def _schedule(self, now: float) -> list[ConsistencyEffect]:
        self._note_due(now)
        if self._call is not None:
            return []
        if self._due is None or self._is_stable_next(self._due[0], now):
            return self._process_stable(now)
        effects: list[ConsistencyEffect] = []
        if self.state is ConsistencyState.STABILIZATION and self._fork is None:
            # The stable branch has passed the tentative one, and an input is missing.
            effects += self._fail_again(now)
        return [*effects, *self._process_tentative(now)]

    def _is_stable_next(self, due: int, now: float) -> bool:
        """Whether complete epochs are processed before the epoch of the fork that is due: if there
        is no fork, if the fork has had more engine time, or if the due epoch is already too late to
        be of use."""
        if self.state is ConsistencyState.UP_FAILURE or not self._inputs.has_ready:
            return False
        late = now > self._deadlines.first_arrival(due) + self._deadlines.complete_wait_s
        return self._fork is None or self._lead_s < 0 or late

    def _process_stable(self, now: float) -> list[ConsistencyEffect]:
        if (
            self._call is not None
            or not self._inputs.has_ready
            or self.state is ConsistencyState.UP_FAILURE
        ):
            return []
        self._call = StableCall(now)
        return [ProcessStable()]

    def take_stable(
        self, take: Callable[[deque[EpochInput]], list[EpochInput]]
    ) -> list[EpochInput]:
        """The epochs of the stable call that begins, at least one. `take` removes them from the
        complete ones; those of them that are not processed then are taken again."""
        assert isinstance(self._call, StableCall), "ProcessStable begins a stable call"
        taken = self._inputs.take(take)
        self._call = StableCall(self._call.began_at, taken[-1].epoch)
        return taken

    def _process_tentative(self, now: float) -> list[ConsistencyEffect]:
        assert self._due is not None
        if self.state is ConsistencyState.STABLE:
            self._inputs.forget_reported()
        self.machine.step("process_tentative")
        (epoch, due), self._due = self._due, None
        effects: list[ConsistencyEffect] = []
        fork = self._fork
        if fork is None:
            self._attempt += 1
            fork = self._fork = Fork(self._attempt, self.stable_epoch, self._watermark)
            effects.append(ForkState(fork.attempt, self.stable_epoch))
        if self._deadlines.deadline(epoch) <= now:
            self._inputs.fail_awaited(epoch)
        formed, present = self._inputs.live.form(epoch, fork.watermark)
        fork.last, fork.watermark = epoch, formed.watermark
        self._inputs.live.advance(epoch + 1)
        self._call = TentativeCall(due, now, fork.attempt, epoch)
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
        """When an epoch is processed with what has arrived; infinite if it has to wait."""
        policy = self._policy(now)
        deadline = self._deadlines.deadline(epoch)
        if policy is Policy.SUSPEND or deadline == math.inf or not self._inputs.can_form(epoch):
            return math.inf
        if self._upstreams_have_waited(epoch):
            return -math.inf
        waits = self._fork is None or self._inputs.awaits_any(epoch)
        return deadline if policy is Policy.DELAY or waits else -math.inf

    def _upstreams_have_waited(self, epoch: int) -> bool:
        """Whether the failure has already delayed an epoch for as long as it may: upstreams have
        decided to go on without what is missing. Otherwise each task of a chain would wait again
        (section 5.2: with Process, the delay does not grow with the length of the chain)."""
        processes = self._settings.during_failure is Policy.PROCESS
        is_first = self.state is ConsistencyState.STABLE
        return processes and is_first and self._inputs.is_tentative(epoch)

    def _policy(self, now: float) -> Policy:
        match self.state:
            case ConsistencyState.STABLE:
                return Policy.DELAY  # section 5.1: short failures cause no tentative output
            case ConsistencyState.UP_FAILURE:
                return self._settings.during_failure
            case ConsistencyState.STABILIZATION:
                policy = self._settings.during_stabilization
                suspended = policy is Policy.SUSPEND or self._partners.served(now)
                if suspended and self._caught_up():
                    return Policy.DELAY  # nothing is left to correct: as in STABLE
                return Policy.SUSPEND if suspended else policy

    def _wakes(self) -> list[float]:
        wakes = [self._due_at(self._live_epoch(), self._now)]
        if self.state is not ConsistencyState.STABLE:
            wakes += self._partners.wakes()
            wakes.append(self._waiting_since + self._deadlines.complete_wait_s)
        if self.state is ConsistencyState.STABILIZATION:
            wakes.append(self._stalled_at())
        return wakes
