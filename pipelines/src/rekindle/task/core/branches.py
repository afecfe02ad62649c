"""The inputs of a task whose output may be tentative: which epochs its loop takes. Pure.

It stands between the consistency manager, which says what is processed on which branch, and the
loop, which takes it when the engine has time. Until the task is Live for the first time nothing is
tentative; nor for a while after a tentative epoch could not be processed, so that the stable branch
gets the engine. What replicas say to each other before they stabilize goes by polls.

Design: docs/design/consistency.md#in-a-task.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencyInput,
    ConsistencySettings,
    DropFork,
    EmitReconciliationDone,
    EmitUndo,
    EndPostponement,
    ForkState,
    MaxDelayChanged,
    ProcessStable,
    ProcessTentative,
    ReadAgain,
    ReadLive,
    RequestPostponement,
    StopLive,
    TentativeProcessed,
)
from rekindle.engine.bounds import CallBounds, take_ready
from rekindle.protocol import ConsistencyState, Partner
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.sunion import Channel
from rekindle.task.core.loop import EpochsTaken, ForkDropped, TentativeTaken
from rekindle.task.core.partner import PartnerMessages

UNANSWERED_S = 30.0
"""How long a task that was restored waits for an input before it is Live, if no replica of it
answers; `maxDelay` if that is longer."""
RETRY_S = 10.0
"""How long after a failed tentative epoch there are no others."""

BranchEffect = EmitUndo | EmitReconciliationDone | ReadLive | StopLive | ReadAgain
Taken = EpochsTaken | TentativeTaken | ForkDropped


class BranchesCore:
    """Of one task. `error`: why no more can be taken."""

    def __init__(self, settings: ConsistencySettings, next_epoch: int, watermark: int) -> None:
        """`watermark`: after `next_epoch - 1`."""
        self.error: Exception | None = None
        self.partner = PartnerMessages()
        self._max_delay_s = settings.max_delay_s
        self._core = ConsistencyCore(replace(settings, max_delay_s=None), next_epoch, watermark)
        self._call: ProcessStable | ProcessTentative | None = None  # not taken yet
        self._forks = self._drops = False  # when it is taken
        self._live = False
        self._was_restored = next_epoch > 0
        self._began: float | None = None  # when it was first not Live
        self._retry_at: float | None = None

    # -- what others may know --------------------------------------------------------------------

    @property
    def state(self) -> ConsistencyState:
        return self._core.state

    @property
    def channels(self) -> tuple[Channel, ...]:
        return self._core.channels

    @property
    def stable_epoch(self) -> int:
        return self._core.stable_epoch

    @property
    def tentative_epoch(self) -> int | None:
        """The newest one, if it is not corrected."""
        return self._core.tentative_epoch

    @property
    def serves(self) -> bool:
        """Whether it gives tentative results: since it is Live, unless one has failed just now."""
        return self._live and self._retry_at is None

    def is_served(self, now: float) -> bool:
        """Whether the partner serves in place of this replica, by its promise."""
        return self._core.is_served(now)

    def suspends(self, now: float) -> bool:
        """Whether new input waits until corrections are done."""
        return self._core.suspends(now)

    def missing(self) -> tuple[Channel, ...]:
        """The channels without which output is tentative."""
        return () if self.state is ConsistencyState.STABLE else self._core.missing()

    def buffered(self) -> tuple[int, int]:
        return self._core.buffered()

    def may_read(self, channel: Channel, live: bool = False) -> bool:
        return self._core.may_read(channel, live)

    @property
    def may_take(self) -> bool:
        """Whether `take` returns something, or raises."""
        return self.error is not None or self._call is not None or self._drops

    @property
    def wake_at(self) -> float | None:
        times = [self._core.wake_at, self._retry_at]
        return min((at for at in times if at is not None), default=None)

    # -- events ----------------------------------------------------------------------------------

    def step(self, event: ConsistencyInput, now: float) -> list[BranchEffect]:
        """Raises InvalidTransition, InvalidInput, Diverged, which are kept too."""
        try:
            effects = self._step(event, now)
            if self._retry_at is not None and now >= self._retry_at:
                self._retry_at = None
                effects += self._step(MaxDelayChanged(self._max_delay_s), now)
        except Exception as error:
            self.failed(error)
            raise
        return effects

    def become_live(self, now: float) -> list[BranchEffect]:
        """From now on the task's output may be tentative."""
        if self._live:
            return []
        self._live = True
        return self.step(MaxDelayChanged(self._max_delay_s), now)

    def wait_for_heads(self, heads: Iterable[int], now: float) -> list[BranchEffect]:
        """What its inputs have said while the task is not Live: the head of each channel, NO_EPOCH
        if no replica has answered. Such an input is missing; what the others have is history. Not
        for a task without a checkpoint, whose upstreams may have to start yet."""
        x = self._max_delay_s
        if self._live or x is None or not self._was_restored:
            return []
        self._began = now if self._began is None else self._began
        answered = [head != NO_EPOCH for head in heads]
        waited = now >= self._began + max(x, UNANSWERED_S)
        if not waited or all(answered) or not any(answered):
            return []
        return self.become_live(now)

    def leave_out(self, attempt: int, epoch: int, now: float) -> list[BranchEffect]:
        """A tentative epoch could not be processed."""
        self._retry_at = now + RETRY_S
        effects = self._step(MaxDelayChanged(None), now)
        return [*effects, *self.step(TentativeProcessed(attempt, epoch), now)]

    def update_partner(self, partner: Partner | None, boot: str, now: float) -> list[BranchEffect]:
        """What a poll says of the other replica; `boot`: of this task. While this one gives no
        tentative results, it is not asked to serve: the partner goes on without its answer."""
        asks = partner.asks if partner is not None else None
        if partner is not None and asks is not None and asks.lease_s and not self.serves:
            partner = partner.model_copy(update={"asks": None})
        events = self.partner.heard(partner, boot)
        return [effect for event in events for effect in self.step(event, now)]

    def failed(self, error: Exception) -> None:
        """The first error is kept."""
        self.error = self.error or error

    def take(self, bounds: CallBounds) -> Taken | None:
        """What is processed next; None if nothing is. Of complete epochs those of one call: the
        others are taken again. Raises what has failed."""
        if self.error is not None:
            raise self.error
        if self._drops:
            self._drops = False
            return ForkDropped()
        call, self._call = self._call, None
        match call:
            case ProcessStable(epochs):
                return EpochsTaken(take_ready(deque(epochs), bounds))
            case ProcessTentative(attempt, epoch):
                forks, self._forks = self._forks, False
                return TentativeTaken(attempt, epoch, forks)
        return None

    def _step(self, event: ConsistencyInput, now: float) -> list[BranchEffect]:
        effects: list[BranchEffect] = []
        for effect in self._core.step(event, now):
            match effect:
                case ProcessStable() | ProcessTentative():
                    self._call = effect
                case ForkState():
                    self._forks, self._drops = True, False
                case DropFork():
                    self._drops = True
                case RequestPostponement() | EndPostponement() | AnswerPartner():
                    self.partner.said(effect)
                case _:
                    effects.append(effect)
        return effects
