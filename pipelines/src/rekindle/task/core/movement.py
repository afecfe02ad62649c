"""What a task decides in state movements, in each of its roles. Pure.

A task that has no state is a newcomer: it follows orders, or a restore point once it will not start
from its session. A task that has state holds its log for the newcomers of its consumers, and may be
a donor (`exchange.state_mover.donor`; its shell steps that core in the thread that gets requests).

Design: docs/design/state-movement.md.
"""

from __future__ import annotations

from rekindle.exchange.state_mover.holds import Holds
from rekindle.exchange.state_mover.messages import (
    Directive,
    Hold,
    NewcomerReport,
    Replica,
    SessionVersion,
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
    """State movements of one boot of a task. `restores`: it restores from a checkpoint.
    `addresses`: of the donors in its orders; those of earlier sessions too, to which the newcomer
    still sends `Release`."""

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
        """Whether it starts from a restore point, or from a partner's state."""
        return self.restores or self._newcomer.started

    def apply_poll(
        self, poll: PollRequest, log_base: int | None, now: float
    ) -> list[NewcomerEffect]:
        """Apply a poll with a desired state. `log_base`: None before the task has a log."""
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
        if poll.movement is None:
            # The coordinator may be of a version that moves no state: then the sessions of all
            # earlier coordinators are abandoned.
            abandoned = SessionVersion(poll.fence, 0)
        if poll.restore is not None and self._newcomer.may_restore(abandoned):
            self.restores = True
            effects += self.step(RestoreBegun(), now)
        return effects

    def step(self, event: NewcomerCoreEvent, now: float) -> list[NewcomerEffect]:
        return self._newcomer.step(event, now)

    def without_early_restore(self, poll: PollRequest) -> PollRequest:
        """The poll, without its restore point while the task may still start from a session."""
        if poll.restore is None or self.restores:
            return poll
        return poll.model_copy(update={"restore": None})

    def floor(self, floor: int) -> int:
        """The epoch through which the log may be truncated: a poll's floor, or less because of
        holds."""
        return self._holds.floor(floor)

    def newcomer_report(self) -> NewcomerReport:
        return self._newcomer.report()

    def holds(self) -> tuple[Hold, ...]:
        return self._holds.confirmed()
