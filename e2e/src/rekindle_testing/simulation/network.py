"""Messages between hosts: each takes a random time, and is lost where the link is down.

Messages of one link may overtake each other, as those of different connections do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

STORE, SINKS, API = "store", "sinks", "api"
"""The hosts outside the cluster's nodes."""
_USUAL_S = (0.0005, 0.01)
_SLOW_S = (0.05, 0.4)
_SLOW_SHARE = 0.03

Reply = Callable[[Any], None]


class Server(Protocol):
    """What listens at a host. `serve` calls `reply` once, sooner or later, or never."""

    @property
    def process(self) -> SimulatedProcess | None: ...

    def serve(self, request: Any, reply: Reply) -> None: ...


class LivenessProbe:
    """A request that a process that runs answers with None."""


class Refused(Exception):
    """The connection was refused: nothing listens at the host."""


class TimedOut(Exception):
    """No reply came in time."""


K = TypeVar("K")


def _count_down(counts: Counter[K], key: K) -> None:
    """A key whose count is 0 is deleted: while all links are up, the counters are empty, which
    `is_up` checks first."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Network:
    """`servers` by host. Links are between nodes, or hosts outside; each has two directions. The
    processes of one node always reach each other."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.servers: dict[str, Server] = {}
        self.node_of: dict[str, str] = {}
        self._down: Counter[tuple[str, str]] = Counter()
        self._isolated: Counter[str] = Counter()
        self._scheduler = scheduler

    def disconnect(self, sender: str, receiver: str) -> None:
        """Lose all messages in this direction, until as many calls of `reconnect`."""
        self._down[sender, receiver] += 1

    def reconnect(self, sender: str, receiver: str) -> None:
        _count_down(self._down, (sender, receiver))

    def isolate(self, node: str) -> None:
        """Lose all messages from and to a node, also refusals, until as many calls of `rejoin`."""
        self._isolated[node] += 1

    def rejoin(self, node: str) -> None:
        _count_down(self._isolated, node)

    def is_up(self, sender: str, receiver: str) -> bool:
        if not (self._down or self._isolated):
            return True
        one, other = self.node_of.get(sender, sender), self.node_of.get(receiver, receiver)
        isolated = self._isolated
        return one == other or not (
            (one, other) in self._down or one in isolated or other in isolated
        )

    def has_link_down(self, node: str) -> bool:
        """Whether a direction of one of its links is disconnected; `isolate` does not count."""
        return any(node in link for link in self._down)

    def is_connected(self, one: str, other: str) -> bool:
        return self.is_up(one, other) and self.is_up(other, one)

    def delay_s(self) -> float:
        scheduler = self._scheduler
        slow = scheduler.random.random() < _SLOW_SHARE
        return scheduler.between(*(_SLOW_S if slow else _USUAL_S))

    def send(self, sender: str, receiver: str, action: Callable[[], None]) -> None:
        """Do something at the receiver, if the message arrives."""

        def arrive() -> None:
            if self.is_up(sender, receiver):
                action()

        if self.is_up(sender, receiver):
            self._scheduler.after(self.delay_s(), arrive)

    def call(
        self,
        caller: SimulatedProcess,
        host: str,
        request: Any,
        ended: Callable[[Any], None],
        timeout_s: float,
    ) -> None:
        """Call the server at a host. `ended` is called once, with the reply, Refused or
        TimedOut, by the calling process."""
        open_calls = [True]

        def end(result: Any) -> None:
            if open_calls:
                open_calls.clear()
                ended(result)

        def reply(result: Any) -> None:
            self.send(host, caller.host, lambda: caller.do(lambda: end(result)))

        def arrive() -> None:
            server = self.servers.get(host)
            process = server.process if server is not None else None
            if server is None or process is None:
                self.send(host, caller.host, lambda: caller.do(lambda: end(Refused())))
            else:
                serving = server
                process.do(lambda: serving.serve(request, reply))

        self.send(caller.host, host, arrive)
        caller.after(timeout_s, lambda: end(TimedOut()))
