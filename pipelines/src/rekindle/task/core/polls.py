"""Which polls a task accepts. Pure.

A poll is level-triggered: the newest one that is not `ask_only` is the task's complete desired
state, until another one arrives. One that was sent for an earlier boot of the container, and comes
late, is not: its restore point may be too old by now. Fencing (I9): polls are refused if their
fence is lower than the highest one seen, or if they are for another topology or another incarnation
of the slot.

Design: docs/design/task.md#passive, docs/design/fencing.md#fences.
"""

from __future__ import annotations

from rekindle.errors import RekindleError
from rekindle.identity import Identity
from rekindle.protocol import Contained, PollRequest, TaskRef


class PollRefused(RekindleError):
    """A poll that must not be applied; `status`: the HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"poll refused: {reason}")
        self.status = status
        self.reason = reason


class PollCore:
    """The polls of one task. `fence`: the highest one seen; `desired`: the newest poll that is not
    `ask_only`, which only asks for a response."""

    def __init__(self, ref: TaskRef, identity: Identity, fence: int, boot_id: str) -> None:
        self.fence = fence
        self.desired: PollRequest | None = None
        self._sender: tuple[int, str] | None = None  # of the newest poll
        self._ref = ref
        self._identity = identity
        self._boot_id = boot_id

    def accept(self, poll: PollRequest) -> bool:
        """Whether the poll is the new desired state. Raises PollRefused."""
        if (mismatch := self._identity.mismatch(poll.topology)) is not None:
            raise PollRefused(421, mismatch)
        if poll.task != self._ref:
            raise PollRefused(410, f"it is for {_name(poll.task)}, this is {_name(self._ref)}")
        if poll.fence < self.fence:
            raise PollRefused(
                409, f"its fence {poll.fence} is below {self.fence}, the highest seen"
            )
        self.fence = poll.fence
        self._sender = _sender(poll)
        if poll.ask_only or poll.task_boot not in ("", self._boot_id):
            return False
        self.desired = poll
        return True

    def contained(self) -> Contained | None:
        """What an earlier process of a coordinator has held back in this task; reported to the
        current one, which does not know it until it has sent a desired state."""
        desired = self.desired
        if desired is None or _sender(desired) == self._sender or desired.sinks_through is None:
            return None
        return Contained(
            after=desired.sinks_through,
            disputed=desired.digests_of,
            disputed_digest=desired.disputed_digest,
        )


def _sender(poll: PollRequest) -> tuple[int, str]:
    return poll.fence, poll.coordinator_boot


def _name(ref: TaskRef) -> str:
    return f"{ref.segment}/{ref.partition}/{ref.replica} incarnation {ref.incarnation}"
