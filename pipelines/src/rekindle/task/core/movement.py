"""What a task decides in state movements, whichever party it is. Pure.

A task that has no state is a newcomer: it follows orders, or a restore point if it has left its
session. One that has state holds its log for the newcomers of its consumers, and may be a donor
(`exchange.state_mover.donor`, which its shell steps where requests arrive).

Design: docs/design/state-movement.md.
"""

from __future__ import annotations

from rekindle.exchange.state_mover.holds import Holds
from rekindle.exchange.state_mover.messages import (
    Directive,
    Hold,
    NewcomerReport,
    Replica,
    Version,
)
from rekindle.exchange.state_mover.newcomer import (
    AbandonReceived,
    NewcomerCore,
    NewcomerCoreEvent,
    NewcomerEffect,
    NewcomerLimits,
    OrderReceived,
    RestoreBegun,
)
from rekindle.protocol import PollRequest, TaskRef
from rekindle.topology.model import Slot


class MovementPart:
    """Of one boot of a task. `restores`: it follows restore points. `addresses`: of the donors in
    its orders, also of earlier sessions, which have to hear that they are over."""

    def __init__(self, ref: TaskRef, boot: str, limits: NewcomerLimits | None = None) -> None:
        self.replica = Replica(Slot(ref.segment, ref.partition, ref.replica), ref.incarnation)
        self.restores = False
        self.addresses: dict[Replica, str] = {}
        self._newcomer = NewcomerCore(self.replica, boot, limits)
        self._holds = Holds()

    @property
    def wake_at(self) -> float | None:
        return self._newcomer.wake_at

    @property
    def has_state(self) -> bool:
        """Whether it starts from a restore point, or from what has moved here."""
        return self.restores or self._newcomer.started

    def follow(self, poll: PollRequest, log_base: int | None, now: float) -> list[NewcomerEffect]:
        """A poll with the desired state. `log_base`: None before it has a log."""
        directive = poll.movement or Directive()
        if log_base is not None:
            self._holds.update(directive.register, directive.release, log_base)
        if self.has_state:
            return []
        effects: list[NewcomerEffect] = []
        if directive.abandoned is not None:
            effects += self.step(AbandonReceived(directive.abandoned), now)
        if directive.order is not None:
            if directive.donor_address:
                self.addresses[directive.order.donor] = directive.donor_address
            effects += self.step(OrderReceived(directive.order), now)
        abandoned = directive.abandoned
        if poll.movement is None:  # its coordinator may be of a release without sessions
            abandoned = Version(poll.fence, 0)
        if poll.restore is not None and self._newcomer.may_restore(abandoned):
            self.restores = True
            effects += self.step(RestoreBegun(), now)
        return effects

    def step(self, event: NewcomerCoreEvent, now: float) -> list[NewcomerEffect]:
        return self._newcomer.step(event, now)

    def permitted(self, poll: PollRequest) -> PollRequest:
        """Without a restore point that is not to be followed: a session may start the task."""
        if poll.restore is None or self.restores:
            return poll
        return poll.model_copy(update={"restore": None})

    def floor(self, floor: int) -> int:
        """How far the log may be truncated, of a poll's floor."""
        return self._holds.floor(floor)

    def newcomer_report(self) -> NewcomerReport:
        return self._newcomer.report()

    def holds(self) -> tuple[Hold, ...]:
        return self._holds.confirmed()
