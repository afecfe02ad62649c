"""The streams that a task reads: which epochs its loop takes, and how far it reads ahead. Pure.

The consistency manager decides what is processed on which branch; this core keeps it until the loop
takes it. With an infinite `maxDelay` there is only the stable branch. Otherwise nothing is
tentative until the task is Live for the first time; nor for a while after a tentative epoch could
not be processed, so that the stable branch gets the engine. Messages between replicas, before they
stabilize, are carried by polls (`partner`).

Design: docs/design/streams.md#sunion, docs/design/consistency.md#in-a-task.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencyEffect,
    ConsistencySettings,
    DropFork,
    EmitReconciliationDone,
    EmitUndo,
    EndPostponement,
    ForkState,
    ProcessStable,
    ProcessTentative,
    ReadLive,
    RequestPostponement,
    ResumeStable,
    StopLive,
)
from rekindle.engine.bounds import CallBounds, take_ready
from rekindle.protocol import ConsistencyState, Partner
from rekindle.streams.epochs import NO_EPOCH, EpochBatch
from rekindle.streams.sunion import Channel
from rekindle.task.core.loop import LoopCore, LoopEffect
from rekindle.task.core.partner import PartnerMessages

UNANSWERED_S = 30.0
"""How long a restored task that is not Live waits for an input of which no replica responds, before
its output may be tentative without it; `maxDelay` if that is longer."""
RETRY_S = 10.0
"""Time after a failed tentative epoch without other tentative epochs."""

InputEffect = EmitUndo | EmitReconciliationDone | ReadLive | StopLive | ResumeStable
Taken = Callable[[LoopCore, float], list[LoopEffect]]
"""Gives a loop what it processes next: a call of a method, at a time."""


class StreamsCore:
    """The streams of one task. `error`: why no more can be taken."""

    def __init__(self, settings: ConsistencySettings, next_epoch: int, watermark: int) -> None:
        """`watermark`: after `next_epoch - 1`."""
        self.error: Exception | None = None
        self.partner = PartnerMessages()
        self._max_delay_s = settings.max_delay_s
        self._core = ConsistencyCore(settings, next_epoch, watermark)
        self._core.max_delay_changed(None, -math.inf)  # until `allow_tentative`
        self._expected_bytes: dict[
            int, dict[Channel, int]
        ] = {}  # bytes of epochs that are not taken
        self._call: ProcessStable | ProcessTentative | None = None  # what `take` returns next
        self._forks = False  # whether `_call` begins a fork
        self._drops = False  # whether the fork is dropped first
        self._tentative_allowed = False
        self._was_restored = next_epoch > 0
        self._began: float | None = None  # the first time of `check_heads`
        self._retry_at: float | None = None

    # -- state for callers -----------------------------------------------------------------------

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
        """The newest epoch that the tentative branch has begun, if it is not corrected; its call
        may have failed."""
        return self._core.tentative_epoch

    @property
    def may_be_tentative(self) -> bool:
        """Whether the task may have tentative results: from `allow_tentative` on, but not for
        RETRY_S after one has failed."""
        return self._tentative_allowed and self._retry_at is None

    def is_served(self, now: float) -> bool:
        """Whether the partner has promised to serve in place of this replica."""
        return self._core.is_served(now)

    def suspends(self, now: float) -> bool:
        """Whether new input waits until corrections are done."""
        return self._core.suspends(now)

    def missing(self) -> tuple[Channel, ...]:
        """The channels without which output is tentative."""
        return () if self.state is ConsistencyState.STABLE else self._core.missing()

    def buffered(self) -> tuple[int, int]:
        """Epochs and bytes, in all buffers."""
        return self._core.buffered()

    def may_read(self, channel: Channel, live: bool = False) -> bool:
        """Whether a subscription may deliver more."""
        return self._core.may_read(channel, live)

    @property
    def may_take(self) -> bool:
        """Whether `take` returns something, or raises."""
        return self.error is not None or self._call is not None or self._drops

    @property
    def wake_at(self) -> float | None:
        times = [self._core.wake_at, self._retry_at]
        return min((at for at in times if at is not None), default=None)

    # -- events; they raise what those of ConsistencyCore do; `error` keeps the first one --------

    def announce(self, channel: Channel, epoch: int, size: int) -> int:
        """A channel will deliver so many bytes of a stable epoch. Returns the bytes of the epoch
        that all channels have announced: in the end they are merged, so all of them are in memory
        at a time."""
        if epoch < self._core.next_epoch:  # a repeated batch of a complete epoch, to be dropped
            return size
        sizes = self._expected_bytes.setdefault(epoch, {})
        sizes[channel] = size  # replaces the size of an earlier request
        return sum(sizes.values())

    def batch_received(
        self, channel: Channel, batch: EpochBatch, now: float, *, live: bool = False
    ) -> list[InputEffect]:
        return self._step(partial(self._core.batch_received, channel, batch, live=live), now)

    def upstream_reported(
        self, channel: Channel, stable: int, tentative: int, now: float
    ) -> list[InputEffect]:
        return self._step(partial(self._core.upstream_reported, channel, stable, tentative), now)

    def stable_processed(self, through: int, now: float) -> list[InputEffect]:
        return self._step(partial(self._core.stable_processed, through), now)

    def tentative_processed(self, attempt: int, epoch: int, now: float) -> list[InputEffect]:
        return self._step(partial(self._core.tentative_processed, attempt, epoch), now)

    def woken(self, now: float) -> list[InputEffect]:
        """Time has passed."""
        return self._step(self._core.woken, now)

    def allow_tentative(self, now: float) -> list[InputEffect]:
        """From now on the task's output may be tentative."""
        if self._tentative_allowed:
            return []
        self._tentative_allowed = True
        return self._step(partial(self._core.max_delay_changed, self._max_delay_s), now)

    def check_heads(self, heads: Iterable[int], now: float) -> list[InputEffect]:
        """Allow tentative output before the task is Live, if an input's replicas have not responded
        for long. `heads`: of each channel; NO_EPOCH if no replica has responded. Ignored by a task
        that started without a checkpoint: its upstreams may still have to start."""
        max_delay_s = self._max_delay_s
        if self._tentative_allowed or max_delay_s is None or not self._was_restored:
            return []
        self._began = now if self._began is None else self._began
        responded = [head != NO_EPOCH for head in heads]
        waited = now >= self._began + max(max_delay_s, UNANSWERED_S)
        if not waited or all(responded) or not any(responded):
            return []
        return self.allow_tentative(now)

    def leave_out(self, attempt: int, epoch: int, now: float) -> list[InputEffect]:
        """A tentative epoch could not be processed: go on without it."""
        self._retry_at = now + RETRY_S
        effects = self._apply(self._core.max_delay_changed(None, now))
        return [*effects, *self.tentative_processed(attempt, epoch, now)]

    def update_partner(self, partner: Partner | None, boot: str, now: float) -> list[InputEffect]:
        """The other replica's messages in a poll; `boot`: of this task. While this replica has no
        tentative results, requests to serve are ignored (but not those without a lease, which end
        one): the partner goes on without an answer."""
        asks = partner.asks if partner is not None else None
        if partner is not None and asks is not None and asks.lease_s and not self.may_be_tentative:
            partner = partner.model_copy(update={"asks": None})
        events = self.partner.receive(partner, boot)
        return [e for event in events for e in self._step(partial(event, self._core), now)]

    def failed(self, error: Exception) -> None:
        """The first error is kept."""
        self.error = self.error or error

    def take(self, bounds: CallBounds) -> Taken | None:
        """What is processed next; None if there is nothing. Of complete epochs, as many as fit into
        one call. Raises `error`."""
        if self.error is not None:
            raise self.error
        if self._drops:
            self._drops = False
            return LoopCore.fork_dropped
        call, self._call = self._call, None
        match call:
            case ProcessStable():
                epochs = self._core.take_stable(lambda ready: take_ready(ready, bounds))
                for epoch in epochs:
                    self._expected_bytes.pop(epoch.epoch, None)
                return lambda loop, now: loop.epochs_taken(epochs, now)
            case ProcessTentative(attempt, epoch):
                forks, self._forks = self._forks, False
                return lambda loop, now: loop.tentative_taken(attempt, epoch, forks, now)
        return None

    def _step(
        self, happened: Callable[[float], list[ConsistencyEffect]], now: float
    ) -> list[InputEffect]:
        """`happened`: a method of the consistency manager, but for the time."""
        try:
            effects = self._apply(happened(now))
            if self._retry_at is not None and now >= self._retry_at:
                self._retry_at = None
                effects += self._apply(self._core.max_delay_changed(self._max_delay_s, now))
        except Exception as error:
            self.failed(error)
            raise
        return effects

    def _apply(self, core_effects: Iterable[ConsistencyEffect]) -> list[InputEffect]:
        effects: list[InputEffect] = []
        for effect in core_effects:
            match effect:
                case ProcessStable() | ProcessTentative():
                    self._call = effect
                case ForkState():
                    self._forks, self._drops = True, False
                case DropFork():
                    self._drops = True
                case RequestPostponement() | EndPostponement() | AnswerPartner():
                    self.partner.send(effect)
                case _:
                    effects.append(effect)
        return effects


InputEvent = Callable[[StreamsCore, float], list[InputEffect]]
"""A call of a method of the streams, at a time."""
