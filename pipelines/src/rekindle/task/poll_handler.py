"""The I/O around `PollCore`: keeps the newest poll, and responds.

Called by the control server's thread while the engine is busy, so nothing here blocks. The fence is
written to the task's disk before the response, so that it survives a restart of the container.

Design: docs/design/task.md#passive, docs/design/fencing.md#fences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from rekindle.engine.version import engine_version
from rekindle.identity import Identity
from rekindle.protocol import PollRequest, PollResponse, TaskPhase, TaskRef
from rekindle.task.core.polls import PollCore
from rekindle.task.fence import NO_FENCE, FenceFile


class PollHandler:
    """`make_response` builds the task's poll response for a fence."""

    def __init__(
        self,
        ref: TaskRef,
        make_response: Callable[[int], PollResponse],
        identity: Identity | None = None,
        fence_file: FenceFile | None = None,
        event_times: Callable[[Sequence[int]], Mapping[int, tuple[int, int]]] = lambda epochs: {},
    ) -> None:
        """`event_times`: through these epochs, of a source that is open."""
        self._identity = identity or Identity()
        self._make_response = make_response
        self._event_times = event_times
        self._lock = threading.Lock()
        self._fence_file = fence_file
        self._stored_fence = fence_file.read() if fence_file is not None else NO_FENCE
        self._core = PollCore(ref, self._identity, self._stored_fence)
        self.failure_reported = False
        """Whether a response has reported to a coordinator that this task failed."""

    def poll(self, poll: PollRequest) -> PollResponse:
        """Apply a poll and return the response. Raises PollRefused."""
        with self._lock:
            self._core.accept(poll)
            self._store_fence()
            contained = self._core.contained()  # what an earlier coordinator has held back here
        response = self._make_response(poll.fence).model_copy(
            update={
                "topology": self._identity.topology,
                "engine": engine_version(),
                "contained": contained,
                "event_times": dict(self._event_times(poll.event_times_of)),
            }
        )
        if response.phase is TaskPhase.FAILED:
            self.failure_reported = True
        return response

    def _store_fence(self) -> None:
        if self._fence_file is None or self._stored_fence == self._core.fence:
            return
        if self._fence_file.write(self._core.fence):
            self._stored_fence = self._core.fence

    @property
    def desired(self) -> PollRequest | None:
        """The newest poll with a desired state, that is, not `ask_only`; None before the first."""
        return self._core.desired
