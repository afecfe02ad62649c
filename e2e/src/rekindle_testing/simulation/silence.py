"""How long hosts could not be heard; and since when all is calm."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rekindle_testing.simulation.scheduler import Scheduler

_PROVES_NOTHING_S = 2.3
"""A silence that is shorter is no proof of a loss (docs/design/recovery.md#loss)."""
_REMEMBERED_S = 15.0


@dataclass(slots=True)
class _Heard:
    last_at: float
    silent_until: float | None = None  # the end of the last silence that proves something


class Silence:
    """Keyed by host."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._heard: dict[str, _Heard] = {}

    def responded(self, host: str) -> None:
        now = self._scheduler.now
        heard = self._heard.setdefault(host, _Heard(now))
        if now - heard.last_at >= _PROVES_NOTHING_S:
            heard.silent_until = now
        heard.last_at = now

    def proves_nothing(self, host: str) -> bool:
        """Whether a host responds, and always did lately."""
        heard, now = self._heard.get(host), self._scheduler.now
        if heard is None or now - heard.last_at >= _PROVES_NOTHING_S:
            return False
        return heard.silent_until is None or now - heard.silent_until > _REMEMBERED_S


class Calm:
    """Counts faults of one kind."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._faults = 0
        self._since = -inf  # the last one ended

    def fault_began(self) -> None:
        self._faults += 1

    def fault_ended(self) -> None:
        self._faults -= 1
        self._since = self._scheduler.now

    @property
    def calm_s(self) -> float:
        """For how long none has happened."""
        return 0.0 if self._faults else self._scheduler.now - self._since
