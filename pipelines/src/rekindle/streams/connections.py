"""Which connections of a server are closed, and when. Pure.

A connection is *admitted* with its first valid request, which needs the topology's token. Until
then it has a fixed deadline, which received bytes do not extend, and the number of such connections
is limited. At the limit, no other is accepted until some time has passed without a valid request of
any connection, and `make_room` was called a few times, each after the server has read what it had
received: all readers of a task may connect at one moment, those on a busy machine send their
requests a second later, and a server that was paused has not read them yet. Then connections that
still have sent no request are closed: the oldest ones of the address that has most of them, so that
a client that opens thousands loses only its own. The next complete request of an admitted
connection has to arrive before the connection has been idle for too long.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

HANDSHAKE_S = 5.0
"""Timeout from the begin of a connection to its first valid request."""
IDLE_S = 30.0
"""Timeout from the end of a response to the next complete request."""
MAX_UNADMITTED = 512
MAX_ADMITTED = 2048
GRACE_S = 2.0
"""Time after which an unadmitted connection may be closed to make room: since it began, and since
the last valid request of any connection."""
GRACE_CALLS = 10
"""The connection also has to be there for more than this number of calls of `make_room`."""

C = TypeVar("C")


def limits(descriptors: int) -> tuple[int, int]:
    """The most unadmitted and the most admitted connections of a process that may open
    `descriptors` file descriptors (below 0: no limit). Unadmitted ones cannot use up the
    descriptors that readers need, nor readers those of the rest of the process."""
    if descriptors < 0:
        return MAX_UNADMITTED, MAX_ADMITTED
    part = descriptors // 8
    return min(MAX_UNADMITTED, part), min(MAX_ADMITTED, descriptors - 2 * part)


@dataclass(frozen=True, slots=True)
class Close(Generic[C]):
    connection: C
    peer: str
    reason: str


class Connections(Generic[C]):
    """Times in seconds."""

    def __init__(
        self, max_unadmitted: int = MAX_UNADMITTED, max_admitted: int = MAX_ADMITTED
    ) -> None:
        self._max_unadmitted = max_unadmitted
        self.max_admitted = max_admitted
        self._peers: dict[C, str] = {}
        self._unadmitted: dict[C, float] = {}  # when they began, the oldest first
        self._room_calls: dict[C, int] = {}  # of unadmitted ones: calls of `make_room` since then
        self._admitted_at = -math.inf  # when the latest one was admitted
        self._idle: dict[C, float] = {}  # admitted ones; deadlines, idle the longest first

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, connection: C) -> bool:
        return connection in self._peers

    @property
    def unadmitted(self) -> int:
        return len(self._unadmitted)

    @property
    def full(self) -> bool:
        """Whether no other may be accepted now."""
        return len(self._unadmitted) >= self._max_unadmitted

    def opened(self, connection: C, peer: str, now: float) -> None:
        self._peers[connection] = peer
        self._unadmitted[connection] = now
        self._room_calls[connection] = 0

    def make_room(self, now: float) -> list[Close[C]]:
        """The connections to close while it is `full`. To be called repeatedly, each time after the
        server has read what it had received."""
        for connection in self._room_calls:
            self._room_calls[connection] += 1
        if now - self._admitted_at < GRACE_S:
            return []
        counts = Counter(self._peers[c] for c in self._unadmitted)
        most = max(counts, key=lambda peer: counts[peer], default="")
        old = [
            c
            for c, opened_at in self._unadmitted.items()
            if self._peers[c] == most
            and self._room_calls[c] > GRACE_CALLS
            and now - opened_at >= GRACE_S
        ]
        reason = f"{len(self._unadmitted)} at once have sent no valid request in time"
        return [self._close(c, reason) for c in old[: -(-self._max_unadmitted // 4)]]

    def admitted(self, connection: C, now: float) -> list[Close[C]] | None:
        """A connection has sent a valid request. Returns the connections to close to make room for
        it; None if it cannot be admitted, because the maximum is in use."""
        if connection not in self._peers or connection not in self._unadmitted:
            self._idle.pop(connection, None)
            return []
        closed = []
        if len(self._peers) - len(self._unadmitted) >= self.max_admitted:
            if not self._idle:
                return None
            closed.append(self._close(next(iter(self._idle)), ""))
        del self._unadmitted[connection], self._room_calls[connection]
        self._admitted_at = now
        return closed

    def idle(self, connection: C, now: float) -> None:
        """A response has ended: the connection is idle."""
        if connection in self._peers and connection not in self._unadmitted:
            self._idle[connection] = now + IDLE_S

    def closed(self, connection: C) -> None:
        self._peers.pop(connection, None)
        self._unadmitted.pop(connection, None)
        self._room_calls.pop(connection, None)
        self._idle.pop(connection, None)

    def expired(self, now: float) -> list[Close[C]]:
        """The connections to close because their deadlines have passed."""
        late = [c for c, opened_at in self._unadmitted.items() if opened_at + HANDSHAKE_S <= now]
        idle = [c for c, deadline in self._idle.items() if deadline <= now]
        reason = f"no valid request within {HANDSHAKE_S:g} s"
        return [self._close(c, reason) for c in late] + [self._close(c, "") for c in idle]

    def _close(self, connection: C, reason: str) -> Close[C]:
        """`reason`: for the log; an empty one is not logged."""
        close = Close(connection, self._peers[connection], reason)
        self.closed(connection)
        return close
