"""Responds to polls, and keeps the highest fence.

Called by the control server's thread while the engine is busy, so nothing here blocks. The fence is
written to the task's disk before the response, so that it survives a restart of the container.

Design: docs/design/task.md#passive, docs/design/fencing.md#fences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rekindle.protocol import PollRequest, PollResponse
from rekindle.task.core.messages import RefusePoll, Respond
from rekindle.task.core.polls import PollRefused
from rekindle.task.fence import FenceFile
from rekindle.task.process import TaskProcess


class PollHandler:
    """`answered` is called by what performs the effects of the core."""

    def __init__(
        self,
        process: TaskProcess,
        fence_file: FenceFile | None = None,
        event_times: Callable[[Sequence[int]], Mapping[int, tuple[int, int]]] = lambda epochs: {},
    ) -> None:
        """`event_times`: through these epochs, of a source that is open."""
        self._process = process
        self._event_times = event_times
        self._fence_file = fence_file
        self._storing = threading.Lock()
        self._stored_fence = process.core.polls.fence
        self._answer: Respond | RefusePoll | None = None  # to the newest poll

    def answered(self, answer: Respond | RefusePoll) -> None:
        self._answer = answer

    def poll(self, poll: PollRequest) -> PollResponse:
        """Apply a poll and return the response. Raises PollRefused."""
        with self._process.lock:
            self._answer = None
            self._process.tell(partial(self._process.core.poll_received, poll))
            answer = self._answer
        assert answer is not None, "the core answers each poll"
        if isinstance(answer, RefusePoll):
            raise PollRefused(answer.status, answer.reason)
        self._store_fence(answer.response.fence)
        times = dict(self._event_times(poll.event_times_of))
        return answer.response.model_copy(update={"event_times": times})

    def _store_fence(self, fence: int) -> None:
        with self._storing:
            if self._fence_file is None or fence <= self._stored_fence:
                return
            if self._fence_file.write(fence):
                self._stored_fence = fence
