"""The simulated API server: answers requests late, wrongly or not at all, and sends watch events.

A watch delivers events of one kind in order. While the server or the connection is down, or the
watch is stalled, it delivers nothing; afterwards it goes on where it was, as a client does that
opens its watch again at the last version. If that version has expired (410), the client has to list
all objects, and goes on after the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle_testing.simulation.kube.objects import (
    ApiEvent,
    ApiObjects,
    ApiRequest,
    ApiResponse,
    matches,
)
from rekindle_testing.simulation.late_requests import perform_now_later_or_never
from rekindle_testing.simulation.network import API, Network, Reply
from rekindle_testing.simulation.overlapping import OverlappingFaults
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

_CALL_S = (0.002, 0.03)
_ERROR_SHARE = 0.4
_CLOSED_AFTER_S = 8.0
"""A client closes a watch that was silent for so long, and opens it again."""
_REOPEN_S = 5.0

Deliver = Callable[[ApiEvent], None]


class SimulatedApiServer:
    """`down`: it does not respond. `fails`: it answers a share of the requests with errors.
    `stalled_until`: until when the open watches of a host deliver nothing."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self.process: SimulatedProcess | None = SimulatedProcess(scheduler, API)
        self.objects = ApiObjects(lambda: scheduler.now, self._changed)
        self.down = OverlappingFaults()
        self.fails = OverlappingFaults()
        self.refusing = OverlappingFaults()
        self.refuses = ""  # the message of refusals, while it is `refusing` dry runs
        self.stalled_until: dict[str, float] = {}
        self.observers: list[Callable[[str, ApiEvent], None]] = []
        self._scheduler = scheduler
        self._network = network
        self._watches: list[Watch] = []
        network.servers[API] = self

    def serve(self, request: ApiRequest, reply: Reply) -> None:
        if self.down:
            self._perform_now_later_or_never(request)
            return
        delay_s = self._scheduler.between(*_CALL_S)
        if self._scheduler.random.random() < (_ERROR_SHARE if self.fails else 0.0):
            self._fail(request, reply, delay_s)
        elif self.refusing and request.verb == "POST" and "dryRun" in request.path:
            refusal = ApiResponse(403, {"kind": "Status", "message": self.refuses}, self.refuses)
            self._scheduler.after(delay_s, lambda: reply(refusal))
        else:
            self._scheduler.after(delay_s, lambda: reply(self.objects.respond(request)))

    def _fail(self, request: ApiRequest, reply: Reply, delay_s: float) -> None:
        """Too many requests; or an error, or no reply at all, though it may have been done."""
        kind = self._scheduler.random.choice((429, 500, 504, None))
        if kind != 429:
            self._perform_now_later_or_never(request)
        if kind is not None:
            body = {"kind": "Status", "message": "injected"}
            self._scheduler.after(delay_s, lambda: reply(ApiResponse(kind, body, "injected")))

    def _perform_now_later_or_never(self, request: ApiRequest) -> None:
        perform_now_later_or_never(self._scheduler, lambda: self.objects.respond(request))

    # --- watches ----------------------------------------------------------------

    def watch(
        self,
        process: SimulatedProcess,
        plural: str,
        after_version: int,
        deliver: Deliver,
        responded: Callable[[], None] = lambda: None,
        selector: str = "",
        expired: Callable[[], None] | None = None,
    ) -> Watch:
        """`responded` is called whenever the client hears from the server; `expired`: when its
        version is no longer known; None: that never happens."""
        found = Watch(self, process, plural, after_version, deliver, responded, selector, expired)
        self._watches.append(found)
        process.every(_REOPEN_S, found.send_later)
        return found

    def expire_watches(self, host: str) -> None:
        """The versions of a host's watches have expired."""
        for watch in self._watches:
            if watch.process.host == host and watch.expired is not None:
                watch.is_expired = True
                watch.send_later()

    def _changed(self, plural: str, event: ApiEvent) -> None:
        for observe in self.observers:
            observe(plural, event)
        self._watches = [w for w in self._watches if not w.process.dead]
        for watch in self._watches:
            if watch.plural == plural:
                watch.send_later()

    def reaches(self, host: str) -> bool:
        return not self.down and self._network.is_connected(API, host)

    def delay_s(self) -> float:
        return self._network.delay_s()

    def is_stalled(self, host: str) -> bool:
        return self._scheduler.now < self.stalled_until.get(host, 0.0)

    def stall(self, host: str, seconds: float) -> None:
        until = self._scheduler.now + min(seconds, _CLOSED_AFTER_S)
        self.stalled_until[host] = max(until, self.stalled_until.get(host, 0.0))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._scheduler.after(delay_s, action)


@dataclass(slots=True)
class Watch:
    """`version`: that of the client's list; only later events are sent. `position`: in the server's
    log of events of this kind. `is_due`: it is scheduled to send. `is_closed`: the client has been
    told that its version has expired."""

    server: SimulatedApiServer
    process: SimulatedProcess
    plural: str
    version: int
    deliver: Deliver
    responded: Callable[[], None]
    selector: str
    expired: Callable[[], None] | None = None
    position: int = field(default=0)
    is_due: bool = field(default=False)
    is_expired: bool = field(default=False)
    is_closed: bool = field(default=False)

    def resume(self, version: int) -> None:
        """The client has a list of this version."""
        self.version, self.is_expired, self.is_closed = version, False, False
        self.send_later()

    def send_later(self) -> None:
        if not self.is_due:
            self.is_due = True
            self.server.after(self.server.delay_s(), self._send)

    def _send(self) -> None:
        self.is_due = False
        host = self.process.host
        if self.process.dead or self.is_closed:
            return
        if not self.server.reaches(host) or self.server.is_stalled(host):
            self.is_due = True
            self.server.after(0.5, self._send)
            return
        if self.is_expired and self.expired is not None:
            self.is_closed = True
            self.process.do(self.expired)
            return
        log = self.server.objects.events[self.plural]
        events, self.position = log[self.position :], len(log)
        fresh = [e for e in events if e.version > self.version and matches(e.raw, self.selector)]
        self.process.do(lambda: self._deliver(fresh))

    def _deliver(self, events: list[ApiEvent]) -> None:
        self.responded()
        for event in events:
            self.deliver(event)
