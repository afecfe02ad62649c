"""Which replica of an upstream partition to read from. Pure.

Replicas of a stable stream say the same, so a reader may switch in the middle of it; it stays with
one as long as that one serves it, because switching costs a connection. It leaves a replica that
failed a call, that the coordinator suspects while another is not suspected, that no longer has the
epoch, that has given nothing new for `stall_s` while there is another to try, or that lags while
another does not and has not been left for cause lately. A replica that failed is not asked again
before its back-off is over, unless it comes as a new incarnation.

Design: docs/design/streams.md#reader.
Paper: DPC (Balazinska et al. 2005), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from rekindle.protocol import Endpoint

FIRST_BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 2.0
FORGIVEN_S = 30.0
"""So long a laggard that gives something is better than one that was left for cause."""


@dataclass(frozen=True, slots=True)
class RoutesChanged:
    """The coordinator's list of replicas, preferred first."""

    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A call returned these consecutive epochs (none: nothing new in the time it waited)."""

    address: str
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call failed; `gone`: the log no longer has the epoch; `late`: it passed its deadline."""

    address: str
    gone: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Take:
    """Use these of the epochs just answered: the new ones."""

    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwitchTo:
    """Read from this replica from now on, from `epoch`; None: there is none to ask for now."""

    address: str | None
    epoch: int


Event = RoutesChanged | Answered | CallFailed
Effect = Take | SwitchTo


@dataclass(slots=True)
class _Standing:
    """What the reader knows of one replica."""

    failures: int = 0
    not_before: float = 0.0
    gone: bool = False
    left_at: float = -math.inf


class ReplicaChoice:
    """The state of one reader. `next_epoch` is the first epoch it has not got yet, `late` how many
    calls for it have passed their deadline at replicas that were not suspected."""

    def __init__(self, next_epoch: int, stall_s: float) -> None:
        self.next_epoch = next_epoch
        self.current: str | None = None
        self.late = 0
        self._stall_s = stall_s
        self._endpoints: tuple[Endpoint, ...] = ()
        self._standings: dict[tuple[str, int], _Standing] = {}
        self._progress_at = 0.0

    def unreadable(self) -> tuple[str, ...]:
        """Addresses whose last call failed."""
        return tuple(e.address for e in self._endpoints if self._standing(e).failures)

    def out_of_reach(self) -> bool:
        """Every replica's log has passed the epoch that is needed."""
        return bool(self._endpoints) and all(self._standing(e).gone for e in self._endpoints)

    def wake(self, now: float) -> list[Effect]:
        """Time has passed."""
        return self._choose(now)

    def step(self, event: Event, now: float) -> list[Effect]:
        match event:
            case RoutesChanged(endpoints):
                self._endpoints = endpoints
                known = {(e.address, e.incarnation) for e in endpoints}
                self._standings = {k: s for k, s in self._standings.items() if k in known}
                return self._choose(now)
            case Answered(address, epochs):
                return self._answered(address, epochs, now)
            case CallFailed(address, gone, late):
                trusted = any(e.address == address and not e.suspected for e in self._endpoints)
                self.late += late and trusted
                self._blame(address, gone, now)
                return self._choose(now)
            case _:
                assert_never(event)

    def _answered(self, address: str, epochs: Sequence[int], now: float) -> list[Effect]:
        new = tuple(e for e in epochs if e >= self.next_epoch)
        if new and new != tuple(range(self.next_epoch, self.next_epoch + len(new))):
            self._blame(address, False, now)  # a gap: it does not keep to the protocol
            return self._choose(now)
        for endpoint in self._endpoints:
            if endpoint.address == address:
                self._standings.pop((address, endpoint.incarnation), None)
        if new:
            self.next_epoch = new[-1] + 1
            self.late = 0
            self._progress_at = now
            return [Take(new), *self._choose(now)]
        if address == self.current and now - self._progress_at >= self._stall_s:
            self._progress_at = now
            others = [e for e in self._askable(now) if e.address != address]
            if others:
                for standing in self._standings_of(address):
                    standing.left_at = now
                return self._switch(self._best(others), now)
        return self._choose(now)

    def _choose(self, now: float) -> list[Effect]:
        askable = self._askable(now)
        mine = next((e for e in askable if e.address == self.current), None)
        if mine is not None and (not mine.suspected or all(e.suspected for e in askable)):
            better = [e for e in askable if mine.lagging and self._keeps_up(e, now)]
            return self._switch(self._best(better), now) if better else []
        return self._switch(self._best(askable) if askable else None, now)

    def _keeps_up(self, endpoint: Endpoint, now: float) -> bool:
        forgiven = now - self._standing(endpoint).left_at >= FORGIVEN_S
        return forgiven and not endpoint.suspected and not endpoint.lagging

    def _switch(self, to: Endpoint | None, now: float) -> list[Effect]:
        address = to.address if to else None
        if address == self.current:
            return []
        self.current = address
        self._progress_at = now
        return [SwitchTo(address, self.next_epoch)]

    def _best(self, endpoints: Sequence[Endpoint]) -> Endpoint:
        return min(endpoints, key=lambda e: (e.suspected, self._standing(e).failures))

    def _askable(self, now: float) -> list[Endpoint]:
        return [e for e in self._endpoints if self._standing(e).not_before <= now]

    def _standing(self, endpoint: Endpoint) -> _Standing:
        return self._standings.get((endpoint.address, endpoint.incarnation), _Standing())

    def _blame(self, address: str, gone: bool, now: float) -> None:
        for standing in self._standings_of(address):
            back_off = min(FIRST_BACK_OFF_S * 2**standing.failures, MAX_BACK_OFF_S)
            standing.failures += 1
            standing.gone = gone
            standing.not_before = now + back_off
            standing.left_at = now

    def _standings_of(self, address: str) -> list[_Standing]:
        return [
            self._standings.setdefault((e.address, e.incarnation), _Standing())
            for e in self._endpoints
            if e.address == address
        ]
