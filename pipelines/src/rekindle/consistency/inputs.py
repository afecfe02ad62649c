"""What a task has received of its inputs, and what it reads next. Pure.

Has the SUnion of each branch, the complete epochs that wait for the stable branch, and the state of
each channel; bounds what they buffer, and begins and ends live subscriptions. Does not know the
states of the consistency manager.

Design: docs/design/consistency.md#channels.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rekindle.consistency.channels import ChannelState
from rekindle.consistency.live_union import LiveUnion
from rekindle.consistency.messages import (
    ConsistencySettings,
    InvalidInput,
    ReadLive,
    ResumeStable,
    StopLive,
)
from rekindle.streams.epochs import BatchKind, EpochBatch, EpochInput
from rekindle.streams.sunion import Channel, SUnion


class ReceivedInputs:
    """`channels`: in merge order; `live`: the epochs of the tentative branch, none if `maxDelay` is
    infinite."""

    def __init__(self, settings: ConsistencySettings, next_epoch: int, watermark: int) -> None:
        self._settings = settings
        self._union = SUnion(settings.inputs, next_epoch, watermark, settings.read_ahead_bytes)
        self._ready: deque[EpochInput] = deque()
        self._ready_bytes = 0
        self._taken: deque[EpochInput] = deque()  # complete epochs in a call
        self.live = LiveUnion(settings.inputs, settings.schemas, next_epoch)
        self.channels = {
            c: ChannelState(received=next_epoch - 1, stable=next_epoch - 1)
            for c in self._union.channels
        }

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not complete."""
        return self._union.next_epoch

    @property
    def deliverable_through(self) -> int:
        """The newest stable epoch that the upstreams of all channels can deliver."""
        return min(channel.stable for channel in self.channels.values())

    @property
    def has_ready(self) -> bool:
        """Whether complete epochs wait for the stable branch."""
        return bool(self._ready)

    def missing(self) -> tuple[Channel, ...]:
        """The channels that `next_epoch` waits for."""
        return self._union.missing()

    def buffered(self) -> tuple[int, int]:
        """Epochs and bytes of memory, in all buffers."""
        ahead = [c.received + 1 - self.next_epoch for c in self.channels.values()]
        live = [self.live.buffered(c) for c in self.channels]
        return (
            len(self._ready) + sum(ahead) + sum(epochs for epochs, _ in live),
            self._ready_bytes + self._union.buffered_bytes + sum(size for _, size in live),
        )

    def is_full(self) -> bool:
        """Whether no more complete epochs may wait."""
        settings = self._settings
        return (
            self._ready_bytes >= settings.read_ahead_bytes
            or len(self._ready) >= settings.max_buffered_epochs
        )

    # -- received and processed epochs -----------------------------------------------------------

    def receive(self, channel: Channel, batch: EpochBatch, live: bool) -> bool:
        """Returns whether it is a stable batch of the next epoch. Raises as `receive_stable`."""
        state, progress = self.channels[channel], False
        match batch.kind:
            case BatchKind.STABLE:
                if not live:
                    progress = self.receive_stable(channel, batch)
                state.stable = max(state.stable, batch.epoch)
            case BatchKind.TENTATIVE:
                state.tentative_received(batch.epoch)
            case BatchKind.UNDO:
                state.undone(batch.epoch)
                self.live.undo(channel, batch.epoch)
                return False
            case BatchKind.RECONCILIATION_DONE:
                state.corrected(batch.epoch)
                return False
        if live and state.live_next is not None:
            state.live_next = max(state.live_next, batch.epoch + 1)
        self.live.add(channel, batch)
        return progress

    def receive_stable(self, channel: Channel, batch: EpochBatch) -> bool:
        """A batch of a stable subscription; returns whether it is one of the next epoch. Raises
        InvalidInput if an epoch was left out, DifferentResults, TentativeRefused."""
        state = self.channels[channel]
        if batch.epoch > state.received + 1:
            raise InvalidInput(
                f"stable epoch {batch.epoch} of stream {batch.stream}/{batch.partition} follows "
                f"{state.received}: epochs between them are missing"
            )
        progress = batch.epoch == self._union.next_epoch
        for complete in self._union.add(channel, batch):
            self._ready.append(complete)
            self._ready_bytes += complete.memory_bytes
        state.received = max(state.received, batch.epoch)
        return progress

    def take(self, take: Callable[[deque[EpochInput]], list[EpochInput]]) -> list[EpochInput]:
        """The complete epochs of a call. `take` removes them from those that wait."""
        taken = take(self._ready)
        self._taken.extend(taken)
        self._ready_bytes -= sum(epoch.memory_bytes for epoch in taken)
        return taken

    def processed(self, through: int) -> int:
        """Drop the epochs through this one; returns the watermark after it. Those that were taken
        after it wait again."""
        while (epoch := self._taken.popleft()).epoch < through:
            pass
        while self._taken:
            later = self._taken.pop()
            self._ready.appendleft(later)
            self._ready_bytes += later.memory_bytes
        return epoch.watermark

    def forget_reported(self) -> None:
        """Of the channels that are missing, forget the epochs that their upstreams have reported:
        they have not arrived."""
        for channel in self.missing():
            self.channels[channel].forget_reported()

    # -- corrections -----------------------------------------------------------------------------

    def are_corrected(self, through: int, next_epoch: int) -> bool:
        """Whether the stable branch may continue. True also if no more can be buffered: then only
        the stable branch frees memory."""
        corrected = (c.is_corrected(through, next_epoch) for c in self.channels.values())
        return self.is_full() or all(corrected)

    def corrected_through(self, through: int, next_epoch: int) -> int | None:
        """Through which epoch the ended corrections of upstreams reach, if that is before
        `through`; None if all is corrected, or a correction has not ended."""
        channels = self.channels.values()
        if not all(c.is_corrected(through, next_epoch) for c in channels):
            return None
        return min((c.corrected_through for c in channels if c.stable < through), default=None)

    def are_missing_upstream(self) -> bool:
        """Whether an upstream does not have the next epoch either."""
        return any(self.channels[c].stable < self.next_epoch for c in self.missing())

    # -- the tentative branch --------------------------------------------------------------------

    def is_awaited(self, channel: Channel, epoch: int) -> bool:
        return not (self.live.has(channel, epoch) or self.live.passed(channel, epoch))

    def awaits_any(self, epoch: int) -> bool:
        """Whether a channel that has not failed may still deliver the epoch."""
        return any(self.is_awaited(c, epoch) and not s.failed for c, s in self.channels.items())

    def is_tentative(self, epoch: int) -> bool:
        """Whether all channels have delivered the epoch, and some of them a tentative version that
        their upstream has not corrected yet."""
        return not any(self.is_awaited(c, epoch) for c in self.channels) and any(
            self.live.is_tentative(c, epoch) and state.stable < epoch
            for c, state in self.channels.items()
        )

    def fail_awaited(self, epoch: int) -> None:
        """The epoch is processed without the channels that have not delivered it in time."""
        for channel, state in self.channels.items():
            state.failed |= self.is_awaited(channel, epoch)

    def can_form(self, epoch: int) -> bool:
        """Whether an epoch has all of its blocking inputs (`whenMissing: Block`)."""
        blocking = (c for c in self.channels if c.input in self._settings.blocking_inputs)
        return all(self.live.has(channel, epoch) for channel in blocking)

    # -- subscriptions ---------------------------------------------------------------------------

    def may_read(self, channel: Channel) -> bool:
        """Whether the stable subscription may deliver more. A channel that lacks the next epoch
        always may, unless too many complete epochs wait."""
        ahead = self.channels[channel].received + 1 - self.next_epoch
        return (
            not self.is_full()
            and self._union.has_buffer_space(channel)
            and ahead < self._settings.max_buffered_epochs
        )

    def may_read_live(self, channel: Channel, live_epoch: int) -> bool:
        """Whether the live subscription may deliver more. A channel that may still deliver
        `live_epoch` always may. One that is beyond it without having delivered it (an UNDO has
        dropped it) may not: the fork, which does not wait for the channel, may be suspended for
        long."""
        epochs, size = self.live.buffered(channel)
        full = epochs >= self._settings.max_buffered_epochs or size >= self._union.channel_bytes
        needed = self.is_awaited(channel, live_epoch)
        return self.channels[channel].live_next is not None and (needed or not full)

    def subscribe(
        self, forked: bool, may_be_tentative: bool, live_epoch: int
    ) -> list[ReadLive | StopLive]:
        """A channel is read live when its upstream is tentative; after a fork also when its stable
        epochs arrive too late for the tentative branch, and when no more of them can be buffered.
        `may_be_tentative`: whether this task may have tentative epochs at all."""
        effects: list[ReadLive | StopLive] = []
        for channel, state in self.channels.items():
            behind = state.stable >= live_epoch > state.received + 1
            subscribed = state.live_next is not None
            after_fork = forked and (subscribed or behind or not self.may_read(channel))
            wanted = may_be_tentative and (state.is_tentative or after_fork)
            if wanted and not subscribed:
                state.live_next = max(state.received + 1, live_epoch)
                effects.append(ReadLive(channel, state.live_next))
            elif subscribed and not wanted:
                state.live_next = None
                effects.append(StopLive(channel))
        return effects

    def read_again(self) -> list[ResumeStable]:
        """Request stable epochs that only the live subscription has delivered, so that they were
        not buffered for the stable branch."""
        return [
            ResumeStable(channel, state.received + 1)
            for channel, state in self.channels.items()
            if state.live_next is not None and state.received + 1 < state.live_next
        ]
