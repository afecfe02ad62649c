"""Serves the stream sinks that the coordinator has assigned to this task.

The port is open while there are any, so a topology without them has no such port, and does not load
Arrow Flight.

Design: docs/design/stream-sinks.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rekindle.identity import Identity
from rekindle.protocol import STREAM_SINK_PORT, SinkAssignment, TaskProblem
from rekindle.stream_sinks.reading import ServedQuery
from rekindle.stream_sinks.spilled import SpilledReads
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog

if TYPE_CHECKING:
    from rekindle.stream_sinks.server import StreamSinkServer

_log = logging.getLogger(__name__)


class StreamSinks:
    """The stream sinks of one task. Thread-safe. `problem`: why nothing is served."""

    def __init__(
        self, log: OutputLog, output: LiveOutput | None, address: str, identity: Identity
    ) -> None:
        self.problem: TaskProblem | None = None
        self._lock = threading.RLock()
        self._log = log
        self._output = output
        self._address = address
        self._identity = identity
        self._assigned: dict[str, SinkAssignment] = {}
        self._served: dict[str, ServedQuery] = {}
        self._server: StreamSinkServer | None = None
        self._spilled = SpilledReads()

    def retain(self, sinks: Iterable[SinkAssignment]) -> None:
        """The log keeps what these stream sinks retain. Also called before the first epoch is
        appended, since the size of the log's files depends on it."""
        retained = (s.sink.retained_bytes for s in sinks if s.sink.stream is not None)
        self._log.retain(max(retained, default=0))

    def assign(self, through: int | None, sinks: Sequence[SinkAssignment]) -> None:
        """Serve these sinks, no epoch above `through` (None: all)."""
        with self._lock:
            assigned = {s.query: s for s in sinks if s.sink.stream is not None}
            if assigned != self._assigned or (assigned and self._server is None):
                self._change(assigned, through)
            for served in self._served.values():
                if served.through != through:
                    served.limit(through)

    def stop(self) -> None:
        with self._lock:
            server, self._server = self._server, None
            if server is not None:
                server.stop()

    def _change(self, assigned: dict[str, SinkAssignment], through: int | None) -> None:
        self.retain(assigned.values())
        for query, before in self._assigned.items():
            if query not in assigned or not before.writes_same_output_as(assigned[query]):
                self._served.pop(query).end()
        for query, sink in assigned.items():
            if query not in self._served:
                self._served[query] = self._query(sink)
                self._served[query].limit(through)  # before it is served
            self._served[query].tentative = _is_tentative(sink)
        self._assigned = assigned
        if not assigned:
            self.stop()
            return
        if self._server is None and not self._open():
            return
        assert self._server is not None
        self._server.serve(self._served.values())

    def _query(self, assigned: SinkAssignment) -> ServedQuery:
        return ServedQuery(
            assigned.query,
            self._log,
            self._output,
            assigned.from_epoch,
            spilled=self._spilled,
        )

    def _open(self) -> bool:
        from rekindle.stream_sinks.server import StreamSinkServer

        try:
            self._server = StreamSinkServer(self._address, STREAM_SINK_PORT, self._identity)
        except OSError as error:  # the next poll tries again
            self.problem = TaskProblem(message=str(error))
            return False
        self.problem = None
        _log.info("serving stream sinks on port %d", self._server.port)
        return True


def _is_tentative(assigned: SinkAssignment) -> bool:
    stream = assigned.sink.stream
    return stream is not None and stream.tentative
