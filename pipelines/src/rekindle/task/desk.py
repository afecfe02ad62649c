"""Where the coordinator's polls meet the task: refusals, the newest wish, and the answer.

Called by the control server's thread while the engine is busy, so nothing here waits for anything.
A poll is level-triggered: the newest full one is the whole wish, and it stays in force however long
no other comes. Fencing (I9): a lower fence than seen is refused, and a poll meant for another
topology or another incarnation of the slot. The fence is on the task's disk before a poll is
answered, so that a container that restarts does not forget it.

Design: docs/design/task.md#passive, docs/design/fencing.md#fences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rekindle.engine.version import engine_version
from rekindle.errors import RekindleError
from rekindle.identity import Identity
from rekindle.protocol import Answer, Poll, TaskPhase, TaskRef
from rekindle.task.fence import NO_FENCE, FenceFile


class Refused(RekindleError):
    """A poll that must not be obeyed; `status` is the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Desk:
    """`answer` makes the task's answer for a fence; set it once there is more to say."""

    def __init__(
        self,
        ref: TaskRef,
        answer: Callable[[int], Answer],
        identity: Identity | None = None,
        fences: FenceFile | None = None,
    ) -> None:
        self._ref = ref
        self._identity = identity or Identity()
        self._answer = answer
        self._changed = threading.Condition()
        self._fences = fences
        self._fence = self._written = fences.read() if fences is not None else NO_FENCE
        self._wish: Poll | None = None
        self._answers_of_failure = 0

    def poll(self, poll: Poll) -> Answer:
        """Take a poll and answer it. Raises Refused."""
        with self._changed:
            if (mismatch := self._identity.mismatch(poll.topology)) is not None:
                raise Refused(421, f"poll refused: {mismatch}")
            if poll.task != self._ref:
                raise Refused(410, f"this is {_name(self._ref)}, not {_name(poll.task)}")
            if poll.fence < self._fence:
                raise Refused(409, f"fence {poll.fence} is below {self._fence}, which was seen")
            self._fence = poll.fence
            self._remember()
            if not poll.ask_only:
                self._wish = poll
                self._changed.notify_all()
        answer = self._answer(poll.fence).model_copy(
            update={"topology": self._identity.topology, "engine": engine_version()}
        )
        if answer.phase is TaskPhase.FAILED:
            with self._changed:
                self._answers_of_failure += 1
                self._changed.notify_all()
        return answer

    def _remember(self) -> None:
        if self._fences is None or self._written == self._fence:
            return
        if self._fences.remember(self._fence):
            self._written = self._fence

    @property
    def wish(self) -> Poll | None:
        """The newest full poll."""
        return self._wish

    def wait_for_start(self, timeout_s: float) -> Poll | None:
        """The newest poll once it names a restore point; None at the time-out."""

        def told() -> bool:
            return self._wish is not None and self._wish.restore is not None

        with self._changed:
            return self._wish if self._changed.wait_for(told, timeout_s) else None

    def wait_until_failure_is_known(self, timeout_s: float) -> bool:
        """Whether a coordinator has been told that this task failed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._answers_of_failure > 0, timeout_s)


def _name(ref: TaskRef) -> str:
    return f"{ref.segment}/{ref.partition}/{ref.replica} incarnation {ref.incarnation}"
