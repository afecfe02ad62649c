"""Accepts or refuses the coordinator's polls, keeps the newest, and responds.

Called by the control server's thread while the engine is busy, so nothing here blocks. A poll is
level-triggered: the newest full one is the task's whole desired state, until another one arrives.
Fencing (I9): polls are refused if their fence is lower than the highest one seen, or if they are
for another topology or another incarnation of the slot. The fence is written to the task's disk
before the response, so that it survives a restart of the container.

Design: docs/design/task.md#passive, docs/design/fencing.md#fences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rekindle.engine.version import engine_version
from rekindle.errors import RekindleError
from rekindle.identity import Identity
from rekindle.protocol import Contained, PollRequest, PollResponse, TaskPhase, TaskRef
from rekindle.task.fence import NO_FENCE, FenceFile


class PollRefused(RekindleError):
    """A poll that must not be applied; `status`: the HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"poll refused: {reason}")
        self.status = status


class PollHandler:
    """`answer` builds the task's poll response for a fence."""

    def __init__(
        self,
        ref: TaskRef,
        answer: Callable[[int], PollResponse],
        identity: Identity | None = None,
        fences: FenceFile | None = None,
    ) -> None:
        self._ref = ref
        self._identity = identity or Identity()
        self._answer = answer
        self._changed = threading.Condition()
        self._fences = fences
        self._fence = self._stored_fence = fences.read() if fences is not None else NO_FENCE
        self._desired: PollRequest | None = None
        self._failures_reported = 0

    def poll(self, poll: PollRequest) -> PollResponse:
        """Apply a poll and return the response. Raises PollRefused."""
        with self._changed:
            if (mismatch := self._identity.mismatch(poll.topology)) is not None:
                raise PollRefused(421, mismatch)
            if poll.task != self._ref:
                raise PollRefused(410, f"it is for {_name(poll.task)}, this is {_name(self._ref)}")
            if poll.fence < self._fence:
                raise PollRefused(
                    409,
                    f"its fence {poll.fence} is below {self._fence}, the highest seen",
                )
            self._fence = poll.fence
            self._store_fence()
            if not poll.ask_only:
                self._desired = poll
                self._changed.notify_all()
            contained = self._contained()
        answer = self._answer(poll.fence).model_copy(
            update={
                "topology": self._identity.topology,
                "engine": engine_version(),
                "contained": contained,
            }
        )
        if answer.phase is TaskPhase.FAILED:
            with self._changed:
                self._failures_reported += 1
                self._changed.notify_all()
        return answer

    def _contained(self) -> Contained | None:
        """A new coordinator does not know what the one before held back."""
        desired = self._desired
        if desired is None or desired.fence == self._fence or desired.sinks_through is None:
            return None
        return Contained(after=desired.sinks_through, disputed=desired.digests_of)

    def _store_fence(self) -> None:
        if self._fences is None or self._stored_fence == self._fence:
            return
        if self._fences.write(self._fence):
            self._stored_fence = self._fence

    @property
    def desired(self) -> PollRequest | None:
        """The newest full poll; None before the first."""
        return self._desired

    def wait_for_start(self, timeout_s: float) -> PollRequest | None:
        """The newest poll once it names a restore point; None at the timeout."""

        def may_start() -> bool:
            return self._desired is not None and self._desired.restore is not None

        with self._changed:
            return self._desired if self._changed.wait_for(may_start, timeout_s) else None

    def wait_until_failure_is_reported(self, timeout_s: float) -> bool:
        """Whether a response has reported to a coordinator that this task failed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failures_reported > 0, timeout_s)


def _name(ref: TaskRef) -> str:
    return f"{ref.segment}/{ref.partition}/{ref.replica} incarnation {ref.incarnation}"
