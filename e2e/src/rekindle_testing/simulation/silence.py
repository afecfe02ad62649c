"""Since when hosts respond, and since when there are no faults of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rekindle_testing.simulation.scheduler import Scheduler

_SILENT_S = 2.0
"""A shorter silence is no proof of a loss (docs/design/recovery.md#loss)."""
_REMEMBERED_S = 15.0


@dataclass(slots=True)
class _Responses:
    last_at: float
    silent_until: float | None = None  # the end of the last silence that may prove a loss


class Silence:
    """Keyed by host."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._responses: dict[str, _Responses] = {}

    def responded(self, host: str) -> None:
        now = self._scheduler.now
        responses = self._responses.setdefault(host, _Responses(now))
        if now - responses.last_at >= _SILENT_S:
            responses.silent_until = now
        responses.last_at = now

    def responds_steadily(self, host: str) -> bool:
        """Whether a host responds, and no silence that may prove a loss ended lately."""
        responses, now = self._responses.get(host), self._scheduler.now
        if responses is None or now - responses.last_at >= _SILENT_S:
            return False
        silent_until = responses.silent_until
        return silent_until is None or now - silent_until > _REMEMBERED_S


class FaultCount:
    """Counts faults of one kind."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._faults = 0
        self._since = -inf  # the last one ended

    def began(self) -> None:
        self._faults += 1

    def ended(self) -> None:
        self._faults -= 1
        self._since = self._scheduler.now

    @property
    def none_for_s(self) -> float:
        """For how long none has happened."""
        return 0.0 if self._faults else self._scheduler.now - self._since
