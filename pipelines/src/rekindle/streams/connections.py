"""Which connections of a server are closed, and when. Pure.

A connection is *admitted* with its first valid request, which needs the topology's token. Until
then it has a deadline that no byte moves, and there are few of them: one too many closes the oldest
of the address that has most, so a stranger who opens thousands only closes its own. An admitted
connection has to begin its next request before it has been idle for too long.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

HANDSHAKE_S = 5.0
"""From the begin of a connection to its first valid request."""
IDLE_S = 30.0
"""From the end of a response to the next whole request."""
MAX_UNADMITTED = 128
MAX_CONNECTIONS = 2048

C = TypeVar("C")


def limits(descriptors: int) -> tuple[int, int]:
    """Unadmitted connections, and all: strangers cannot take the descriptors of a process that may
    have so many open; below 0: any number."""
    if descriptors < 0:
        return MAX_UNADMITTED, MAX_CONNECTIONS
    return min(MAX_UNADMITTED, descriptors // 8), min(MAX_CONNECTIONS, descriptors // 2)


@dataclass(frozen=True, slots=True)
class Close(Generic[C]):
    connection: C
    peer: str
    reason: str


class Connections(Generic[C]):
    """Times in seconds."""

    def __init__(
        self, max_unadmitted: int = MAX_UNADMITTED, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        self._max_unadmitted = max_unadmitted
        self._max = max_connections
        self._peers: dict[C, str] = {}
        self._unadmitted: dict[C, float] = {}  # deadlines, the oldest connection first
        self._idle: dict[C, float] = {}  # admitted ones; deadlines, idle the longest first

    def __len__(self) -> int:
        return len(self._peers)

    def opened(self, connection: C, peer: str, now: float) -> list[Close[C]]:
        """What is to be closed for it, or itself; the caller does not report that as `closed`."""
        closed: list[Close[C]] = []
        if len(self._unadmitted) >= self._max_unadmitted:
            counts = Counter(self._peers[c] for c in self._unadmitted)
            counts[peer] += 1
            (most, number), *_ = counts.most_common(1)
            oldest = next((c for c in self._unadmitted if self._peers[c] == most), connection)
            waiting = len(self._unadmitted)
            reason = f"{waiting} have not sent a valid request yet, {number} of them from there"
            closed.append(self._close(oldest, reason, peer))
        elif len(self._peers) >= self._max:
            oldest = next(iter(self._idle), connection)
            closed.append(self._close(oldest, f"there are {self._max} connections", peer))
        if all(c.connection is not connection for c in closed):
            self._peers[connection] = peer
            self._unadmitted[connection] = now + HANDSHAKE_S
        return closed

    def busy(self, connection: C) -> None:
        """It has sent a valid request."""
        self._unadmitted.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: C, now: float) -> None:
        """Its response has ended."""
        if connection in self._peers and connection not in self._unadmitted:
            self._idle[connection] = now + IDLE_S

    def closed(self, connection: C) -> None:
        self._peers.pop(connection, None)
        self._unadmitted.pop(connection, None)
        self._idle.pop(connection, None)

    def expired(self, now: float) -> list[Close[C]]:
        """What is to be closed because its time has passed."""
        late = [c for c, deadline in self._unadmitted.items() if deadline <= now]
        idle = [c for c, deadline in self._idle.items() if deadline <= now]
        reason = f"no valid request within {HANDSHAKE_S:g} s"
        return [self._close(c, reason) for c in late] + [self._close(c, "") for c in idle]

    def _close(self, connection: C, reason: str, peer: str = "") -> Close[C]:
        """Without a reason it is not worth a message."""
        close = Close(connection, self._peers.get(connection, peer), reason)
        self.closed(connection)
        return close
