"""Which replica of an upstream partition to read from. Pure.

Replicas of a stable stream serve equal epochs, so a reader may switch between them at any epoch. It
stays with one as long as it can, because switching costs a connection. It switches from a replica

- that failed a call, or no longer has the epoch,
- that the coordinator suspects, while another one is not suspected,
- that returned nothing new for `stall_s`, while another one can be tried,
- that lags, while another one does not and has not failed or stalled recently (a live reader stays
  with one in UP_FAILURE),
- whose output is not STABLE, to one whose output is; a live reader also from one in STABILIZATION
  to one in UP_FAILURE.

If no replica is STABLE, a reader of stable epochs prefers one in STABILIZATION, because stable
epochs do not progress in UP_FAILURE; a live reader prefers one in UP_FAILURE.

A replica that failed is not called again before its back-off is over, unless it has a new
incarnation.

Design: docs/design/streams.md#reader.
Paper: DPC (Balazinska et al. 2005), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy
from rekindle.protocol import ConsistencyState, Endpoint

_BACKOFF = BackoffPolicy(first_s=0.1, longest_s=2.0, jitter=0.5)
REPORTED_STATE_VALID_S = 2.0
"""For this long, the state of its output that a replica has reported is preferred to that in the
routes, which may be older."""
FAILURE_MEMORY_S = 30.0
"""A replica that failed or stalled is not preferred to a lagging one for this long."""


def preferred_states(*, live: bool) -> Sequence[ConsistencyState]:
    """The states of a replica's output, best first: for a live reader, or one of stable epochs,
    which do not progress in UP_FAILURE."""
    stable, failure, correction = (
        ConsistencyState.STABLE,
        ConsistencyState.UP_FAILURE,
        ConsistencyState.STABILIZATION,
    )
    return (stable, failure, correction) if live else (stable, correction, failure)


@dataclass(frozen=True, slots=True)
class DeliverEpochs:
    """Deliver these of the received epochs: the new ones."""

    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwitchReplica:
    """Read from this replica, beginning with `epoch`; None: no replica can be called for now."""

    address: str | None
    epoch: int


Effect = DeliverEpochs | SwitchReplica


@dataclass(slots=True)
class _ReplicaHealth:
    """What the reader knows of one replica; times in seconds."""

    failures: int = 0
    retry_at: float = 0.0
    truncated: bool = False
    failed_at: float = -math.inf  # the last failure, or stall


class ReplicaChoice:
    """The state of one reader. `next_epoch`: the first epoch that it has not received; `timeouts`:
    calls for that epoch that passed their deadline, at replicas that were not suspected; 0 again
    once all replicas have responded in time, without the epoch."""

    def __init__(
        self,
        next_epoch: int,
        stall_s: float,
        draw: Callable[[], float] = lambda: 1.0,
        *,
        live: bool = False,
    ) -> None:
        """`draw`: of the jitter of back-offs, from 0 to 1; `live`: tentative results are read."""
        self._live = live
        self._states: dict[str, tuple[ConsistencyState, float]] = {}  # reported by replicas, when
        self._draw = draw
        self.next_epoch = next_epoch
        self.current: str | None = None
        self.timeouts = 0
        # Addresses that have responded since `next_epoch` advanced and since their last timeout.
        self._responded_in_time: set[str] = set()
        self._stall_s = stall_s
        self._endpoints: tuple[Endpoint, ...] = ()
        self._health: dict[tuple[str, int], _ReplicaHealth] = {}
        self._progress_at = 0.0

    def unreadable(self) -> tuple[str, ...]:
        """Addresses whose last call failed."""
        return tuple(e.address for e in self._endpoints if self._health_of(e).failures)

    @property
    def failures(self) -> int:
        """At each replica at least this number of calls in a row have failed."""
        return min((self._health_of(e).failures for e in self._endpoints), default=0)

    def all_truncated(self) -> bool:
        """Whether no replica's log has the needed epoch any more."""
        return bool(self._endpoints) and all(self._health_of(e).truncated for e in self._endpoints)

    def timeouts_extending_call_at(self, address: str) -> int:
        """The timeouts that extend the deadline of the next call at a replica; 0 if it has
        responded in time without the epoch: then it is not slow because the epoch is large."""
        return 0 if address in self._responded_in_time else self.timeouts

    def wake_at(self) -> float | None:
        """When the first back-off ends, if no replica can be called before."""
        if self.current is not None or not self._endpoints:
            return None
        return min(self._health_of(e).retry_at for e in self._endpoints)

    def woken(self, now: float) -> list[Effect]:
        """Time has passed."""
        return self._choose(now)

    def routes_changed(self, endpoints: tuple[Endpoint, ...], now: float) -> list[Effect]:
        """The coordinator's list of replicas, preferred first."""
        self._endpoints = endpoints
        known = {(e.address, e.incarnation) for e in endpoints}
        self._health = {k: s for k, s in self._health.items() if k in known}
        self._responded_in_time &= {address for address, _ in known}
        self._states = {
            e.address: self._states[e.address] for e in endpoints if e.address in self._states
        }
        return self._choose(now)

    def epochs_received(self, address: str, epochs: Sequence[int], now: float) -> list[Effect]:
        """A call returned these consecutive epochs (none: nothing new in the time it waited)."""
        new = tuple(e for e in epochs if e >= self.next_epoch)
        if new and new != tuple(range(self.next_epoch, self.next_epoch + len(new))):
            # A gap: the replica violates the protocol.
            self._record_failure(address, truncated=False, now=now)
            return self._choose(now)
        self._responded(address)
        if new:
            return [DeliverEpochs(new), *self._progressed(new[-1] + 1, now)]
        return self._nothing_new(address, now)

    def live_received(self, address: str, next_epoch: int, new: bool, now: float) -> list[Effect]:
        """A live call returned; `next_epoch`: the first one needed after it; `new`: whether it
        returned anything new."""
        self._responded(address)
        return self._progressed(next_epoch, now) if new else self._nothing_new(address, now)

    def call_failed(
        self, address: str, now: float, *, truncated: bool = False, timed_out: bool = False
    ) -> list[Effect]:
        """`truncated`: the replica's log no longer has the epoch."""
        if timed_out:
            self._responded_in_time.discard(address)
            self.timeouts += any(e.address == address and not e.suspected for e in self._endpoints)
        self._record_failure(address, truncated, now)
        return self._choose(now)

    def _responded(self, address: str) -> None:
        for endpoint in self._endpoints:
            if endpoint.address == address:
                self._health.pop((address, endpoint.incarnation), None)

    def _progressed(self, next_epoch: int, now: float) -> list[Effect]:
        self.next_epoch = next_epoch
        self.timeouts = 0
        self._responded_in_time.clear()
        self._progress_at = now
        return self._choose(now)

    def _nothing_new(self, address: str, now: float) -> list[Effect]:
        self._responded_in_time.add(address)
        if all(e.address in self._responded_in_time for e in self._endpoints):
            self.timeouts = 0
        if address == self.current and now - self._progress_at >= self._stall_s:
            self._progress_at = now
            others = [e for e in self._available(now) if e.address != address]
            if others:
                for health in self._health_of_address(address):
                    health.failed_at = now
                return self._switch(self._best(others, now), now)
        return self._choose(now)

    def _choose(self, now: float) -> list[Effect]:
        available = self._available(now)
        current = next((e for e in available if e.address == self.current), None)
        if current is not None and (not current.suspected or all(e.suspected for e in available)):
            better = [
                e
                for e in available
                if (self._lags(current, now) or self._is_better(e, current, now))
                and self._keeps_up(e, now)
            ]
            return self._switch(self._best(better, now), now) if better else []
        return self._switch(self._best(available, now) if available else None, now)

    def record_state(self, address: str, state: ConsistencyState, now: float) -> None:
        """A replica has reported the state of its output."""
        if state is not ConsistencyState.STABLE or self._states:
            self._states[address] = (state, now)

    def _state_of(self, endpoint: Endpoint, now: float) -> ConsistencyState:
        state, at = self._states.get(endpoint.address, (endpoint.state, now))
        known = endpoint.address == self.current or now - at < REPORTED_STATE_VALID_S
        return state if known else endpoint.state

    def _is_better(self, endpoint: Endpoint, current: Endpoint, now: float) -> bool:
        """Whether the output of another replica is STABLE and that of the current one is not; for a
        live reader also whether it is UP_FAILURE and that of the current one is STABILIZATION."""
        state, current_state = self._state_of(endpoint, now), self._state_of(current, now)
        if current_state is ConsistencyState.STABLE:
            return False
        stable = state is ConsistencyState.STABLE
        return stable or (self._live and self._rank(state) < self._rank(current_state))

    def _rank(self, state: ConsistencyState) -> int:
        return preferred_states(live=self._live).index(state)

    def _keeps_up(self, endpoint: Endpoint, now: float) -> bool:
        healthy = now - self._health_of(endpoint).failed_at >= FAILURE_MEMORY_S
        return healthy and not endpoint.suspected and not self._lags(endpoint, now)

    def _lags(self, endpoint: Endpoint, now: float) -> bool:
        """Replicas are compared by their stable epochs. Those of one in UP_FAILURE stand still
        while another one corrects its own; a live reader needs its tentative ones."""
        serves_live = self._live and self._state_of(endpoint, now) is ConsistencyState.UP_FAILURE
        return endpoint.lagging and not serves_live

    def _switch(self, to: Endpoint | None, now: float) -> list[Effect]:
        address = to.address if to else None
        if address == self.current:
            return []
        self.current = address
        self._progress_at = now
        return [SwitchReplica(address, self.next_epoch)]

    def _best(self, endpoints: Sequence[Endpoint], now: float) -> Endpoint:
        def rank(endpoint: Endpoint) -> tuple[bool, int, int]:
            state = self._rank(self._state_of(endpoint, now))
            return endpoint.suspected, state, self._health_of(endpoint).failures

        return min(endpoints, key=rank)

    def _available(self, now: float) -> list[Endpoint]:
        return [e for e in self._endpoints if self._health_of(e).retry_at <= now]

    def _health_of(self, endpoint: Endpoint) -> _ReplicaHealth:
        return self._health.get((endpoint.address, endpoint.incarnation), _ReplicaHealth())

    def _record_failure(self, address: str, truncated: bool, now: float) -> None:
        for health in self._health_of_address(address):
            health.failures += 1
            health.truncated = truncated
            health.retry_at = now + _BACKOFF.wait_s(health.failures, self._draw())
            health.failed_at = now

    def _health_of_address(self, address: str) -> list[_ReplicaHealth]:
        return [
            self._health.setdefault((e.address, e.incarnation), _ReplicaHealth())
            for e in self._endpoints
            if e.address == address
        ]
